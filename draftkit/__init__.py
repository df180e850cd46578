"""Distil, judge and use a draft model for speculative decoding; see `draftkit.api`.

The names below are loaded when they are first used: `import draftkit.theory` loads torch alone.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftkit.api import (
        Evaluation,
        Generated,
        Pair,
        distill,
        evaluate,
        generate,
        load_pair,
    )
    from draftkit.distillation.fit import Fitted

for _key in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):  # no library phones home
    os.environ.setdefault(_key, "1")

__all__ = [
    "Evaluation",
    "Fitted",
    "Generated",
    "Pair",
    "distill",
    "evaluate",
    "generate",
    "load_pair",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("draftkit.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
