"""The dry run: `limit=3` with `distill`, `evaluate`, `generate` or `export`, and in `check`.

Each stage that is to do runs for real below `<root>/.dry`, in a process of its own: a few full-size
batches (`dry_stage`), so that its peak of memory and the seconds it takes are known before it
begins. Texts are read as the run will use them; all else is deleted at the end.
"""

import heapq
import multiprocessing
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from draftkit.artifacts import LOCK, locked, remove
from draftkit.data.prompts import Example
from draftkit.data.rollouts import OPTIONAL, Record, read_records, write_records
from draftkit.data.splits import ABOUT, SCHEMA, SPLITS, read_splits
from draftkit.data.store import write_rows
from draftkit.distillation.progress import duration
from draftkit.distillation.ranks import processes
from draftkit.distillation.scores import SCORED_AT_ONCE
from draftkit.models.devices import resolve_device
from draftkit.models.memory import free_bytes

from .dry_stage import FEWEST, LONGEST, OWN, run_dry
from .lengths import answer_tokens
from .product import Product, ordered, pending, table
from .stage import check, make
from .weights import gigabytes, refuse_too_large

FOLDER = ".dry"
METHOD = "forkserver"  # of starting processes: they share the imports of the first
# Not the command, which each process imports under another name and would warn to have already.
PRELOADED = ["draftkit.evaluation.judge", "draftkit.distillation.fit", "draftkit.api"]
LOOKED_AT = 1 << 15  # rows among which the longest are sought
FILES = 3  # of answers whose lengths are changed
ANSWERS = ("generate", "contexts")
# How the allocators of CPU and CUDA say that there is no more.
NO_MEMORY = re.compile(r"allocate memory|out of memory|not enough memory|bad_alloc", re.IGNORECASE)
REMEDIES = {
    "generate": "lower generate.batch_size or data.max_completion_tokens",
    "contexts": "lower evaluate.batch_size or evaluate.max_new_tokens",
    "train": "halve optim.per_device_train_batch_size and double "
    "optim.gradient_accumulation_steps, or use optim.activation_checkpointing=true",
    "evaluate": "lower evaluate.batch_size or evaluate.max_new_tokens, or evaluate.lossless=off",
}
SMALLER = "use a smaller model, or a lower draft.pretrain.per_device_train_batch_size"


def dry_run(name: str, goal: Product, limit: int) -> None:
    """Print what every stage to do for `goal` takes. Raises ValueError for what does not fit."""
    if processes() > 1:
        raise ValueError("limit: a dry run is one process, and each of a launch takes as much")
    to_do = pending([goal])
    for step in to_do:
        check(step)
    refuse_too_large(to_do)
    for step in to_do:
        if step.name == "texts":
            make(step)
    waiting = [step for step in to_do if step.name != "texts"]
    free = free_bytes(resolve_device(goal.config.hardware))
    root, taken = Path(goal.config.root) / FOLDER, dict[Path, dict[str, float]]()
    folders = {step.folder: root / f"{n}-{step.name}" for n, step in enumerate(waiting)}
    with locked(root):
        _empty(root)
        try:
            texts = texts_by_order(goal, waiting, root, limit)
            for number, step in enumerate(waiting, 1):
                print(f"{name}: dry run of {step.name} ({number} of {len(waiting)})", flush=True)
                inputs = {order: inputs_of(step, order, folders, texts) for order in (OWN, LONGEST)}
                taken[step.folder] = measured(step, limit, folders[step.folder], inputs)
        except MemoryError as error:
            raise ValueError(
                f"{step.name} does not fit: {error} with {gigabytes(free)} free: "
                f"{REMEDIES.get(step.name, SMALLER)}"
            ) from None
        finally:
            _empty(root)
            sizes = {
                folder: f"{gigabytes(one['peak']):>8} {duration(one['seconds']):>13}  "
                for folder, one in taken.items()
            }
            print(table([goal], waiting, sizes))
    peak = max((one["peak"] for one in taken.values()), default=0)
    seconds = duration(sum(one["seconds"] for one in taken.values()))
    print(f"fits: {gigabytes(peak)} of {gigabytes(free)}, about {seconds}")


def _empty(folder: Path) -> None:
    for child in folder.iterdir():
        if child.name != LOCK:
            remove(child)


def measured(
    step: Product, limit: int, folder: Path, inputs: Mapping[str, Mapping[str, Path]]
) -> dict[str, float]:
    """What `run_dry` gives, in a process of its own. Raises what it raises, and MemoryError."""
    context: Any = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(PRELOADED)
    job = (step.name, step.config, limit, folder, inputs, step.digests)
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(run_dry, *job).result()
        except BrokenProcessPool:  # as a control group ends it
            raise MemoryError("the system ended its process") from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
                raise MemoryError("it ran out of memory") from None
            raise


def inputs_of(
    step: Product, order: str, folders: Mapping[Path, Path], texts: Mapping[str, Path]
) -> dict[str, Path]:
    """What `step` needs, as it is given, made already, or left by the dry run in `folders`.

    Of the longest order are texts, and answers behind the longest prompts, as long as they get.
    """
    inputs = dict(step.paths)
    for name, need in step.inputs.items():
        left, scored = folders.get(need.folder), step.inputs.get("scores")
        if need.name == "texts" and (scored is None or scored.folder in folders):
            inputs[name] = texts[order]  # what is scored already has the rows of all texts
        elif left is not None:
            own = need.name not in (*ANSWERS, "scores")
            inputs[name] = left / (OWN if own else order) / (need.stage.product or "")
        if order == LONGEST and need.name in ANSWERS:
            folder = texts[LONGEST].parent / f"{need.name}-{need.address}"
            if not folder.exists():
                lengthen(need, inputs[name], texts[LONGEST], folder)
            inputs[name] = folder
    return inputs


# Rows as long as they get


def texts_by_order(
    goal: Product, waiting: Sequence[Product], root: Path, limit: int
) -> dict[str, Path]:
    """The texts in their own order (few, where all would be scored), and the longest, in `root`."""
    texts = next((one.path for one in ordered([goal]) if one.name == "texts"), None)
    if texts is None:
        return {}
    config, own = goal.config, texts
    fixed = config.source.name == "fixed"
    if fixed and any(one.name == "scores" for one in waiting):
        own = write_texts(texts, root / OWN, 2 * limit * SCORED_AT_ONCE)
    rows = max(config.generate.batch_size, config.evaluate.batch_size, FEWEST)
    rows = max(rows, config.optim.rows_of_a_process)
    longest = write_texts(texts, root / LONGEST, rows, key="whole" if fixed else "prompt")
    return {OWN: own, LONGEST: longest}


def write_texts(texts: Path, folder: Path, rows: int, key: str = "") -> Path:
    """Leave `rows` of each split in `folder`: the first, or the longest (`prompt` or `whole`)."""
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


def lengthened(record: Record, prompt: Sequence[int], new: int) -> Record:
    """`record` behind `prompt`, its answer (and what is stored for its tokens) of `new` tokens."""
    names = [n for n in ("output_ids", *OPTIONAL) if getattr(record, n) is not None]
    values: Any = {name: list(islice(cycle(getattr(record, name)), new)) for name in names}
    return replace(record, prompt_ids=list(prompt), **values)


def lengthen(answers: Product, source: Path, texts: Path, folder: Path) -> None:
    """Leave answers of `source` in `folder`, behind the prompts in `texts` of their split."""
    splits, config, most = read_splits(texts), answers.config, None
    new = splits.room.new
    if answers.name == "contexts":
        options, new = config.evaluate, answer_tokens(config)
        most = max(FEWEST, options.batch_size, options.timing_batch_size)
    folder.mkdir()
    for path in sorted(source.glob("*.parquet"))[:FILES]:
        rows = cycle([*getattr(splits, path.stem, splits.train)])
        pairs = zip(read_records(path)[:most], rows, strict=False)
        longest = [lengthened(record, row.prompt_ids, new) for record, row in pairs]
        write_records(folder / path.name, longest)
