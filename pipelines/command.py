"""A stage as a command: Hydra around it, one clear line for bad input, exit codes.

Exit code 0: complete. 2: something that the user can put right, told in one line on stderr.
1: a bug, with its traceback. 130: interrupted. This module does not know what is launched.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from draftkit.config import Config

from .configuration import (
    COMPOSITION_ERRORS,
    CONF_DIR,
    check_own_files,
    explain,
    fixed_overrides,
    register_schema,
    spelled_out,
    swept_label,
    to_config,
)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
DRY = ("distill", "evaluate", "generate", "export", "check")  # what takes `limit`
OVERRIDE = re.compile(r"[^-].*=|~")  # a word that is neither an option nor its value

Launch = Callable[[Config, str], Any]


def disk_is_full(error: BaseException) -> bool:
    """Whether `error` says so, as an OSError or in the words of a library that wraps it."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    return "No space left on device" in str(error)


def user_line(error: Exception) -> str:
    """The one line about an error that is the user's to put right; empty for a bug."""
    if isinstance(error, COMPOSITION_ERRORS):
        return explain(error)
    if disk_is_full(error):
        full = getattr(error, "filename", None) or "the output folder"
        return f"no space left on the device of {full}: free some, or use root=..."
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
        return f"{error.strerror}: {error.filename}; change its permissions, or use root=..."
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    return ""


def _guard(name: str, call: Callable[[], Any], *, raw: bool) -> None:
    """Run `call`; end the process with one line for what the user can put right."""
    try:
        call()
        return
    except KeyboardInterrupt:
        line, code = "interrupted: the same command goes on from the last checkpoint", 130
    except Exception as error:
        if raw:
            raise
        line, code = user_line(error), 2
        if not line:
            traceback.print_exc()
            raise SystemExit(1) from None
    print(f"{name}: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def run_command(name: str, launch: Launch) -> None:
    """Compose `sys.argv`, validate, and call `launch(config, swept)` for every job.

    `swept` tells the jobs of a sweep apart and is empty otherwise. With HYDRA_FULL_ERROR=1 in the
    environment errors come out whole.
    """
    register_schema()
    raw = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    sys.argv[1:] = spelled_out(sys.argv[1:])
    fixed = fixed_overrides(sys.argv[1:])
    # argparse reads overrides in one piece: let options stand among them.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: bool(OVERRIDE.match(word)))

    def job(composed: DictConfig) -> None:
        # Hydra would announce an error of the job by a line of its own: it never sees one.
        def checked() -> None:
            check_own_files()
            config = to_config(composed)
            if config.limit is not None and name not in DRY:
                raise ValueError(f"limit: there is a dry run of {', '.join(DRY)}, none of {name}")
            launch(config, swept_label(fixed))

        _guard(name, checked, raw=raw)

    job.__module__ = f"{__package__}.{name}"  # Hydra names the job after it
    decorate = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us whole, to be told in one line
    _guard(name, decorate(job), raw=raw)
