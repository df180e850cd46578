"""`python -m pipelines.benchmark`: the decoder beside Hugging Face and beside the theory.

Times our plain and speculative decoding and Hugging Face's `generate` on one pair, the same
held-out prompts, gamma and precision, in turns, in one process (how: `benchmarks/decoder.py`).
The pair is the experiment's, its drafter the one that `evaluate.draft` names; or, with
`benchmark.weights=random`, models of the `pretrain` shapes, for speed and bandwidth alone. With
`benchmark.subject=distill` it is training that is measured, beside TRL's
(`benchmarks/training.py`), and with `benchmark.subject=gpu` all
that needs a GPU (`benchmarks/gpu`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import fingerprint, read_json
from draftkit.config import Config
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.judge import Prompts
from draftkit.models.devices import resolve_device
from draftkit.models.loading import load_draft, load_target
from draftkit.theory.speedup import Costs

from .benchmarks import training
from .benchmarks.ceilings import copy_bandwidth
from .benchmarks.decoder import PLAIN, Pair, Point, headline, measure, setting_of
from .benchmarks.decoder_report import LEGEND, benchmark_tables
from .benchmarks.gpu import run as gpu
from .benchmarks.random_models import random_model, random_texts
from .evaluate import drafts_of, judged_inputs, prompts_in
from .generate import contexts
from .plan import Given, StageFolder, Step
from .prepare import check_pair, pair_and_text
from .run import peak_memory_bytes, stage

RANDOM_CALIBRATION_PROMPTS = 8
MIN_CHUNKS = 6  # of a setting: fewer admit no 95 % interval of a median


def needs(config: Config) -> Mapping[str, Given | Step]:
    """Checksums of the pair, the text and the drafter; of random models, their shapes.

    Raises ValueError for a device that is not there, before anything is made for it.
    """
    if config.benchmark.subject == "gpu":
        return gpu.needs(config)
    resolve_device(config.hardware)
    if config.benchmark.subject == "distill":
        return pair_and_text(config)
    if config.benchmark.weights == "random":
        shapes = [asdict(config.target.pretrain), asdict(config.draft.pretrain)]
        return {"shapes": Given(fingerprint(shapes))}
    return {**judged_inputs(config), "contexts": contexts.step(config)}


def check(config: Config) -> None:
    """Raise ValueError for a given pair of different vocabularies."""
    if config.benchmark.subject != "gpu" and config.benchmark.weights == "pair":
        check_pair(config)


def held_out_pair(config: Config, folder: StageFolder) -> tuple[Pair, Prompts]:
    """The experiment's models, and prompts that neither was trained on."""
    target = load_target(folder.model(config, "target"), config.hardware)
    pad, ends = target.tokenizer.pad_token_id, target.eos_token_ids
    draft = load_draft(list(drafts_of(config, folder).values())[-1], target)
    pair = Pair(target.adapter, draft, ends, pad if pad is not None else next(iter(ends), 0))
    return pair, prompts_in(folder, folder.input("contexts"))


def random_pair(config: Config) -> tuple[Pair, Prompts]:
    """Models of random weights and prompts of random tokens: their speed is that of real ones."""
    vocab_size, seed = config.data.vocab_size, config.seed
    target, draft = (
        random_model(model.pretrain, config.hardware, vocab_size=vocab_size, seed=seed + number)
        for number, model in enumerate((config.target, config.draft))
    )
    most = max(prompts_of(config, size) for size in config.benchmark.batch_sizes)
    count, tokens = most + RANDOM_CALIBRATION_PROMPTS, config.data.prompt_tokens
    texts = random_texts(count, tokens, vocab_size=vocab_size, seed=seed)
    return Pair(target, draft), Prompts(test=texts[:most], calibration=texts[most:])


def prompts_of(config: Config, batch_size: int) -> int:
    """How many prompts a setting takes."""
    return max(config.benchmark.prompts // batch_size, MIN_CHUNKS) * batch_size


def points_of(config: Config, pair: Pair, prompts: Prompts, folder: StageFolder) -> list[Point]:
    """Measure every method at every temperature and batch size; each point is logged."""
    options, decode = config.benchmark, config.decode
    fixed = options.compiled_batch_sizes if decode.compiles or decode.captures else []
    points: list[Point] = []
    for temperature in options.temperatures:
        costs: dict[bool, dict[int, Costs]] = {True: {}, False: {}}
        for size in options.batch_sizes:
            setting = setting_of(
                prompts,
                sampling=replace(config.sampling, temperature=temperature),
                max_new_tokens=options.max_new_tokens,
                gamma=config.proposals,
                seed=config.seed,
                verification=decode.verification,
                eos_token_ids=pair.eos_token_ids,
                batch_size=size,
                compiled=decode.compiles and size in fixed,
                captured=decode.captures and size in fixed,
            )
            available = len(prompts.test)
            if available < 2 * size:
                raise ValueError(
                    f"benchmark.batch_sizes: {size} rows need {2 * size} held-out prompts, there "
                    f"are {available}: leave it out, or raise evaluate.prompts"
                )
            count = min(prompts_of(config, size), available // size * size)
            folder.note(f"temperature {temperature:g}, batch {size}: {count} prompts")
            measured = measure(
                pair,
                replace(prompts, test=prompts.test[:count], documents=prompts.documents[:count]),
                setting,
                options.methods,
                costs=costs[size in fixed],
                proposer=decode.proposer,
            )
            for step, point in enumerate(measured, len(points)):
                shown = {key: point[key] for key in ("temperature", "batch_size", "seconds")}
                shown["tokens_per_second"] = point["tokens_per_second"]["median"]
                folder.tracker.log(f"benchmark_{point['method']}", step, shown)
            points += measured
    columns = ["method", "temperature", "batch_size", "tokens_per_second", "ratio_to_plain"]
    medians = [(p["tokens_per_second"], p["ratios"].get(PLAIN, {})) for p in points]
    rows = [
        [*(point[key] for key in columns[:3]), rate["median"], ratio.get("median")]
        for point, (rate, ratio) in zip(points, medians, strict=True)
    ]
    folder.tracker.table("benchmark/points", columns, rows)
    return points


def bandwidth(points: Sequence[Point], pair: Pair) -> dict[str, Any]:
    """How much of a copy's rate plain decoding of one row reaches: weight bytes x tokens a second.

    Of the first such point; without the prefill, which reads the weights once for many tokens.
    """
    plain = (p for p in points if p["method"] == PLAIN and p["batch_size"] == 1)
    rates = [p["tokens"] / (p["seconds"] - p["prefill_seconds"]) for p in plain]
    copied = copy_bandwidth(pair.target.device)
    achieved = pair.target.weight_bytes * rates[0] if rates else None
    return {
        "weight_bytes": pair.target.weight_bytes,
        "copy_bytes_per_second": copied,
        "plain_bytes_per_second": achieved,
        "fraction": None if achieved is None else achieved / copied,
    }


def show(config: Config, folder: Path) -> None:
    """Print the tables of a complete benchmark."""
    summary = read_json(folder / "summary.json")
    if config.benchmark.subject == "distill":
        return training.show(summary)
    if config.benchmark.subject == "gpu":
        return gpu.show(summary, folder)
    console = Console(width=80, highlight=False)
    for table in benchmark_tables(summary["points"]):
        console.print(table)
    console.print(LEGEND)
    memory = summary["bandwidth"]
    if memory["fraction"] is not None:
        console.print(
            f"Plain decoding reads {memory['plain_bytes_per_second'] / 1e9:.1f} GB/s of weights, "
            f"{memory['fraction']:.0%} of a copy's {memory['copy_bytes_per_second'] / 1e9:.1f}."
        )
    console.print(
        f"{summary['dtype']}; {summary['compile_seconds']:.0f} s of compiling in no measured time; "
        f"peak memory {summary['peak_memory_bytes'] / 1e9:.2f} GB."
    )


@stage(
    sections=(
        *("seed", "data", "sampling", "decode", "benchmark"),
        *("divergence", "optim.learning_rate", "optim.per_device_train_batch_size"),
        *("evaluate.draft", "evaluate.prompts", "evaluate.validation_prompts"),
    ),
    needs=needs,
    check=check,
    product=None,
    after=show,
)
def benchmark(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Measure all settings; the numbers of greedy decoding of one row stand at the top."""
    if config.benchmark.subject == "distill":
        return training.measure(config, folder)
    if config.benchmark.subject == "gpu":
        return gpu.measure(config, folder)
    compiling = -compile_seconds()
    is_random = config.benchmark.weights == "random"
    pair, prompts = random_pair(config) if is_random else held_out_pair(config, folder)
    points = points_of(config, pair, prompts, folder)
    return {
        **headline(points),
        "gamma": config.proposals,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "bandwidth": bandwidth(points, pair),
        "compile_seconds": compiling + compile_seconds(),
        "peak_memory_bytes": peak_memory_bytes(),
        "points": points,
    }


if __name__ == "__main__":
    benchmark.main()
