"""Experiments that show draftkit at work, or replay a paper; commands of `pipelines` run them."""
