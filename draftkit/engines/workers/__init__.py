"""Programs that run in the environment of an engine; each is one file, and imports that engine."""
