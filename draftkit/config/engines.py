"""What is written for the engines that people run, and which one is asked what it counts."""

from dataclasses import dataclass

from draftkit.config.choices import DTYPE_NAMES, EXPORT_NAMES, Section, setting


@dataclass(kw_only=True)
class ExportConfig(Section, key="export"):
    """A drafter for other engines: a plain folder, and how each loads and starts it."""

    # hf, the plain folder, is written in any case; the others add launch files to it.
    engines: list[str] = setting(EXPORT_NAMES[:3], names=EXPORT_NAMES, filled=True, unique=True)
    # Of the plain folder; null: as the drafter is stored. Engines load it in the target's.
    dtype: str | None = setting(None, names=DTYPE_NAMES)
    push_to_hub: str | None = None  # ORG/NAME: the plain folder is also uploaded there


@dataclass(kw_only=True)
class EngineConfig(Section, key="engine"):
    """A server of vLLM, SGLang or llama.cpp that runs with the drafter, and has no other client."""

    url: str | None = None  # as http://127.0.0.1:8000
