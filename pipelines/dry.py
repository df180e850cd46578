"""The dry run: `limit=3` with `distill`, `evaluate`, `generate` or `export`, and in `check`.

Each stage that is to do runs for real below `<root>/.dry`, in a process of its own: a few full-size
batches (`rehearsal`), so that its peak of memory and the seconds it takes are known before it
begins. Texts are read as the run will use them; all else is deleted at the end.
"""

import heapq
import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from draftkit.artifacts import remove
from draftkit.data.corpora import SPLITS
from draftkit.data.prompts import ABOUT, SCHEMA, Example, read_splits
from draftkit.data.store import write_rows
from draftkit.distillation.progress import duration
from draftkit.distillation.ranks import processes
from draftkit.distillation.scores import SCORED_AT_ONCE
from draftkit.models.devices import resolve_device
from draftkit.models.memory import free_bytes

from .lengths import answer_tokens
from .lock import LOCK, locked
from .product import GIVEN, SUMMARY, Product, ordered, pending
from .rehearsal import Job, lengthen, main
from .stage import check, make, notice
from .weights import gigabytes, refuse_too_large

FOLDER = ".dry"
METHOD = "forkserver"  # of starting processes: they share the imports of the first
# Not the command, which each process imports under another name and would warn to have already.
PRELOADED = ["draftkit.evaluation.judge", "draftkit.distillation.fit", "draftkit.api"]
LOOKED_AT = 1 << 15  # rows among which the longest are sought
REMEDIES = {
    "generate": "lower generate.batch_size or data.max_completion_tokens",
    "contexts": "lower evaluate.batch_size or evaluate.max_new_tokens",
    "train": "halve optim.per_device_train_batch_size and double "
    "optim.gradient_accumulation_steps, or use optim.activation_checkpointing=true",
    "evaluate": "lower evaluate.batch_size or evaluate.max_new_tokens, or evaluate.lossless=off",
}
SMALLER = "use a smaller model, or a lower per_device_train_batch_size of its pretrain"


def dry_run(name: str, goals: Sequence[Product], limit: int) -> None:
    """Print what every stage to do for `goals` takes. Raises ValueError for what does not fit."""
    if processes() > 1:
        raise ValueError("limit: a dry run is one process, and each of a launch takes as much")
    to_do = pending(goals)
    for step in to_do:
        check(step)
    refuse_too_large(to_do)
    for step in to_do:
        if step.name == "texts":
            make(step)
    for step in to_do:
        notice(step)
    config = goals[0].config
    free, root = free_bytes(resolve_device(config.hardware)), Path(config.root) / FOLDER
    waiting = [step for step in to_do if step.name != "texts"]
    measured: dict[Path, dict[str, float]] = {}
    with locked(root, wait=False):
        _empty(root)
        try:
            stages = Rehearsals(root, waiting, limit)
            for number, step in enumerate(waiting, 1):
                print(f"{name}: dry run of {step.name} ({number} of {len(waiting)})", flush=True)
                result = stages.measure(step)
                if "failed" in result:
                    show(ordered(goals), to_do, measured)
                    raise ValueError(
                        f"{step.name} does not fit: {result['failed']} with {gigabytes(free)} "
                        f"free: {REMEDIES.get(step.name, SMALLER)}"
                    )
                measured[step.folder] = result
        finally:
            _empty(root)
    show(ordered(goals), to_do, measured)
    peak = max((one["peak"] for one in measured.values()), default=0)
    seconds = duration(sum(one["seconds"] for one in measured.values()))
    print(f"fits: {gigabytes(peak)} of {gigabytes(free)}, about {seconds}")


class Rehearsals:
    """The stages that are `waiting`, of which each reads what those before it have left."""

    def __init__(self, root: Path, waiting: Sequence[Product], limit: int) -> None:
        self.root, self.limit = root, limit
        self.dry = {one.folder: root / f"{n}-{one.name}" for n, one in enumerate(waiting)}
        self.scored = any(one.name == "scores" for one in waiting)

    def measure(self, step: Product) -> dict[str, Any]:
        """What the process of `step` sends. Raises ValueError for what it refuses."""
        texts = next(one.path for one in ordered([step]) if one.name == "texts")
        own, longest = (self._inputs(step, texts, longest=value) for value in (False, True))
        folder, digests = self.dry[step.folder], step.digests
        job = Job(step.name, step.config, self.limit, folder, texts, own, longest, digests)
        context: Any = multiprocessing.get_context(METHOD)
        if METHOD == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=main, args=(job, sender))
        process.start()
        sender.close()
        try:
            result = receiver.recv()
        except EOFError:
            result = {}
        process.join()
        if "refused" in result:
            raise ValueError(result["refused"])
        if "bug" in result or (not result and process.exitcode >= 0):
            raise RuntimeError(f"the dry run of {step.name} failed:\n{result.get('bug', '')}")
        return result or {"failed": "the system ended its process"}  # as a control group ends it

    def _inputs(self, step: Product, texts: Path, *, longest: bool) -> dict[str, Path]:
        """What `step` needs, as it is given, made already, or left by the dry run."""
        inputs: dict[str, Path] = {}
        for name, need in step.inputs.items():
            if need.stage is GIVEN:
                inputs[name] = need.path
            elif need.name == "texts":
                inputs[name] = self._texts(step, texts, longest=longest)
            elif need.folder in self.dry:
                records = need.name in ("generate", "contexts", "scores")
                folder = self.dry[need.folder] / ("longest" if longest and records else "own")
                inputs[name] = folder / (need.stage.product or "")
            elif longest and need.name in ("generate", "contexts"):
                inputs[name] = self._lengthened(step, need, texts)
            else:
                inputs[name] = need.path
        return inputs

    def _texts(self, step: Product, texts: Path, *, longest: bool) -> Path:
        """The texts in their own order (few, where all would be scored), or the longest."""
        config = step.config
        fixed = config.source.name == "fixed"
        stored = fixed and config.generate.top_k > 0 and step.name in ("scores", "train")
        if stored and not self.scored:  # what is scored already has those rows
            return texts
        if not longest:
            rows = 2 * self.limit * SCORED_AT_ONCE
            return write_texts(texts, self.root / "few", rows) if stored else texts
        rows = max(config.generate.batch_size, config.evaluate.batch_size, 32)
        rows = max(rows, config.optim.rows_of_a_process)
        return write_texts(texts, self.root / "longest", rows, key="whole" if fixed else "prompt")

    def _lengthened(self, step: Product, need: Product, texts: Path) -> Path:
        """Answers that are made already, behind the longest prompts and as long as they get."""
        folder = self.root / f"{need.name}-{need.address}"
        if not folder.exists():
            splits = read_splits(self._texts(step, texts, longest=True))
            new = splits.room.new if need.name == "generate" else answer_tokens(need.config)
            lengthen(need.path, folder, vars(splits), new)
        return folder


def write_texts(texts: Path, folder: Path, rows: int, key: str = "") -> Path:
    """Leave `rows` of each split in `folder`: the first, or the longest (`prompt` or `whole`)."""
    if folder.exists():
        return folder
    splits = read_splits(texts)

    def length(example: Example) -> int:
        return len(example.token_ids if key == "whole" else example.prompt_ids)

    folder.mkdir()
    for split in SPLITS:
        some = islice(getattr(splits, split), LOOKED_AT)
        chosen = heapq.nlargest(rows, some, key=length) if key else islice(some, rows)
        write_rows(folder / f"{split}.arrow", SCHEMA, map(vars, chosen))
    shutil.copyfile(texts / ABOUT, folder / ABOUT)
    for tokenizer in texts.glob("tokenizer"):
        shutil.copytree(tokenizer, folder / tokenizer.name)
    return folder


def _empty(folder: Path) -> None:
    for child in folder.iterdir():
        if child.name != LOCK:
            remove(child)


def show(
    steps: Sequence[Product], to_do: Sequence[Product], measured: Mapping[Path, Mapping[str, float]]
) -> None:
    """Print the plan with what each step takes, at 80 columns."""
    print(f"  {'step':<9} {'':<9} {'memory':>8} {'time':>13}  folder")
    waiting = {step.folder for step in to_do if step.name != "texts"}
    for step in steps:
        state, folder = "complete", step.folder.relative_to(step.config.root)
        memory = seconds = ""
        if step.folder in waiting:
            state, result = "to do", measured.get(step.folder)
            memory = gigabytes(result["peak"]) if result else ""
            seconds = duration(result["seconds"]) if result else ""
        elif not (step.folder / SUMMARY).is_file():
            state = "not needed"
        print(f"  {step.name:<9} {state:<10}{memory:>8} {seconds:>13}  {folder}"[:80])
