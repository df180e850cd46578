"""A stage as a command: Hydra around it, one clear line for bad input, exit codes.

Exit code 0: complete. 2: something that the user can put right, told in one line on stderr.
1: a bug, with its traceback. 130: interrupted.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from draftkit.artifacts import fingerprint
from draftkit.config import Config
from draftkit.distillation.ranks import is_first, leave_group

from .configuration import (
    COMPOSITION_ERRORS,
    CONF_DIR,
    OVERRIDE,
    explain,
    register_schema,
    spelled_out,
    to_config,
)
from .dry import dry_run
from .product import Stage, complete_summary, plan
from .stage import make_all, module_of, say, show_plan

DRY = ("distill", "evaluate", "generate", "export", "check")  # what takes `limit`
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def guarded(name: str, *, raw: bool = False) -> Iterator[None]:
    """End the process with one line for what the user can put right, and a traceback for a bug."""
    try:
        yield
        return
    except KeyboardInterrupt:
        line, code = "interrupted: the same command goes on from the last checkpoint", 130
    except Exception as error:
        if raw:
            raise
        code, system = 2, error if isinstance(error, OSError) else OSError()
        if isinstance(error, COMPOSITION_ERRORS):
            line = explain(error)
        # A library that writes by itself says it in words.
        elif system.errno in FULL or "No space left on device" in str(error):
            line = (
                f"no space left on the device of {system.filename or 'the output folder'}: free "
                "some and run the same command again (what was complete is intact), or use "
                "root=... on another device"
            )
        elif system.errno in FORBIDDEN:
            line = f"{system.strerror}: {system.filename}; change its permissions, or use root=..."
        elif isinstance(error, ValueError):
            line = " ".join(str(error).split())
        else:
            traceback.print_exc()
            raise SystemExit(1) from None
    print(f"{name}: {line}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def run_command(name: str, launch: Callable[[Config], Any]) -> None:
    """Compose `sys.argv`, validate, and call `launch` for every job.

    `Config.job` tells the jobs of a sweep apart. With HYDRA_FULL_ERROR=1 in the environment errors
    come out whole.
    """
    register_schema()
    raw = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")

    def job(composed: DictConfig) -> None:
        with guarded(name, raw=raw):  # here, lest Hydra announces an error by a line of its own
            config = to_config(composed)
            if config.limit is not None and (config.certify or name not in DRY):
                raise ValueError(f"limit: there is a dry run of {', '.join(DRY)}, none of {name}")
            active, label = HydraConfig.get(), None
            if active.mode == RunMode.MULTIRUN and (swept := active.job.override_dirname):
                label = re.sub(r"[^\w.,=+-]", "_", swept)
                label = label if len(label) <= 120 else f"{label[:100]}-{fingerprint(swept)}"
                say(f"{name}: sweep job {label}")
            launch(replace(config, job=label))

    job.__module__ = f"{__package__}.{name}"  # Hydra names the job after it
    decorate = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us whole, to be told in one line

    with guarded(name, raw=raw):
        # argparse reads overrides in one piece: let options stand among them.
        words = spelled_out(sys.argv[1:])
        sys.argv[1:] = sorted(words, key=lambda word: bool(OVERRIDE.match(word)))
        decorate(job)()


def launch(stage: Stage, config: Config) -> dict[str, Any]:
    """Print the plan, make what is missing, then what `show` of the stage's module prints.

    Gives the summary. Raises ValueError, one line, for everything that the user can put right.
    """
    limit, config = config.limit, replace(config, limit=None)
    product, name = plan(stage, config), stage.name
    redo = product.command if config.overwrite else ""
    if config.plan:
        show_plan(name, [product], redo)
        return {}
    if limit is not None:
        dry_run(name, product, limit)
        return {}
    if not make_all(name, [product], redo=redo, mine=product.command):
        say(f"{name}: {product.folder} is complete, nothing to do (overwrite=true redoes it)")
    if not is_first():
        return {}
    summary = complete_summary(product)
    assert summary is not None
    if (show := getattr(module_of(stage), "show", None)) is not None:
        show(config, product.folder)
    return summary


def main(stage: Stage, run: Callable[[Config], Any] | None = None) -> None:
    """The command `python -m pipelines.<stage>`; `run`: what it does instead of `launch`."""
    try:
        run_command(stage.name, run or partial(launch, stage))
    finally:
        leave_group()
