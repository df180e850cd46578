"""Work on several pairs with one import of an engine, which takes longer than a tiny pair.

Run with an engine's own interpreter, as all of this folder: nothing of draftkit is imported here.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]  # what to do, with `folder`, where its log and its result go


def each(work: Callable[[Job], Job]) -> None:
    """Give each job of the file that the command line names to `work`, in a process of its own.

    A job's result goes to `<folder>/result.json`: what `work` returns, or `error`, in one line.
    """
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        result = Path(job["folder"]) / "result.json"
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            log = os.open(result.with_name("log.txt"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                content = work(job)
            except BaseException as error:  # a builder may end by sys.exit
                traceback.print_exc()
                content = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
            result.write_text(json.dumps(content), encoding="utf-8")
            sys.stdout.flush()
            os._exit(0)  # an engine's own end waits for what was never begun here
        _, status = os.waitpid(child, 0)
        if not result.exists():
            text = f"the engine ended with status {os.waitstatus_to_exitcode(status)}"
            result.write_text(json.dumps({"error": text}), encoding="utf-8")
