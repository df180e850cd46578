"""`python -m pipelines.benchmarks.decoder`: the decoder beside Hugging Face and beside the theory.

Times our plain and speculative decoding and Hugging Face's `generate` on one pair, the same
held-out prompts, gamma and precision, in turns, in one process (how: `decoder_points.py`). The pair
is the experiment's, its drafter the one that `evaluate.draft` names. On CUDA models of random
weights follow, an 8 B shape with each of its drafters, for speed and bandwidth alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.judge import Prompts
from draftkit.models.devices import resolve_device
from draftkit.models.loading import load_draft, load_target
from draftkit.theory.speedup import Costs, expected_tokens, speedup_from_length

from ..evaluate import drafts_of, judged_inputs, prompts_in
from ..generate import contexts
from ..plan import Given, StageFolder, Step
from ..prepare import check_pair
from ..run import peak_memory_bytes, stage
from .decoder_points import (
    ADAPTIVE,
    HF_ASSISTED,
    HF_LOOKUP,
    HF_PLAIN,
    PLAIN,
    SPECULATIVE,
    Pair,
    Point,
    headline,
    measure,
    setting_of,
)
from .decoder_report import LEGEND, benchmark_tables
from .random_models import DRAFTERS, TARGET, VOCAB_SIZE, random_model, random_texts
from .timing import copy_bandwidth


@dataclass(frozen=True)
class Grid:
    """Which settings are timed, and the methods that take turns in each."""

    methods: Sequence[str]
    temperatures: Sequence[float]
    batch_sizes: Sequence[int]


PAIR = {
    "cpu": Grid(
        (PLAIN, SPECULATIVE, ADAPTIVE, HF_PLAIN, HF_ASSISTED, HF_LOOKUP), (0, 1), (1, 4, 8, 16)
    ),
    "cuda": Grid((PLAIN, SPECULATIVE, HF_PLAIN, HF_ASSISTED), (0, 1), (1, 8)),
}
RANDOM = Grid((PLAIN, SPECULATIVE, HF_PLAIN, HF_ASSISTED), (1,), (1, 8))
COMPILED_BATCH_SIZES = {"cpu": (1,), "cuda": (1, 8)}  # the rest runs eagerly
PROMPTS = 24  # of a setting; more where a batch size would make too few chunks of them
MIN_CHUNKS = 6  # of a setting: fewer admit no 95 % interval of a median
MAX_NEW_TOKENS = 96
RANDOM_PROMPT_TOKENS, RANDOM_CALIBRATION_PROMPTS = 32, 8
LIKELY_ALPHA = 0.8  # for which the measured costs of random models are turned into a speed-up


def needs(config: Config) -> Mapping[str, Given | Step]:
    """Checksums of the pair, the text and the drafter.

    Raises ValueError for a device that is not there, before anything is made for it.
    """
    resolve_device(config.hardware)
    return {**judged_inputs(config), "contexts": contexts.step(config)}


def held_out_pair(config: Config, folder: StageFolder) -> tuple[Pair, Prompts]:
    """The experiment's models, and prompts that neither was trained on."""
    target = load_target(folder.model(config, "target"), config.hardware)
    pad, ends = target.tokenizer.pad_token_id, target.eos_token_ids
    draft = load_draft(list(drafts_of(config, folder).values())[-1], target)
    pair = Pair(target.adapter, draft, ends, pad if pad is not None else next(iter(ends), 0))
    return pair, prompts_in(folder, folder.input("contexts"))


def prompts_of(batch_size: int) -> int:
    """How many prompts a setting takes."""
    return max(PROMPTS // batch_size, MIN_CHUNKS) * batch_size


def points_of(
    config: Config, pair: Pair, prompts: Prompts, grid: Grid, folder: StageFolder, first: int = 0
) -> list[Point]:
    """Measure every method of `grid` in every setting; each point is logged, from step `first`."""
    decode, device = config.decode, pair.target.device.type
    fixed = COMPILED_BATCH_SIZES[device] if decode.compiles or decode.captures else ()
    points: list[Point] = []
    for temperature in grid.temperatures:
        costs: dict[bool, dict[int, Costs]] = {True: {}, False: {}}
        for size in grid.batch_sizes:
            setting = setting_of(
                prompts,
                sampling=replace(config.sampling, temperature=temperature),
                max_new_tokens=MAX_NEW_TOKENS,
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
                    f"evaluate.prompts: {size} rows need {2 * size} held-out prompts, there are "
                    f"{available}: raise it"
                )
            count = min(prompts_of(size), available // size * size)
            folder.note(f"temperature {temperature:g}, batch {size}: {count} prompts")
            measured = measure(
                pair,
                replace(prompts, test=prompts.test[:count], documents=prompts.documents[:count]),
                setting,
                grid.methods,
                costs=costs[size in fixed],
                proposer=decode.proposer,
            )
            for step, point in enumerate(measured, first + len(points)):
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


def random_points(config: Config, folder: StageFolder, first: int = 0) -> dict[str, Any]:
    """Points and bandwidth of `TARGET` with each of `DRAFTERS`, all of random weights.

    What such models agree on means nothing; what a round costs does not depend on it. So the
    speed-up that these costs give at `LIKELY_ALPHA` stands beside what was measured.
    """
    name, shape = TARGET
    target = random_model(shape, config.hardware, vocab_size=VOCAB_SIZE, seed=config.seed)
    most = max(map(prompts_of, RANDOM.batch_sizes))
    count = most + RANDOM_CALIBRATION_PROMPTS
    texts = random_texts(count, RANDOM_PROMPT_TOKENS, vocab_size=VOCAB_SIZE, seed=config.seed)
    prompts = Prompts(test=texts[:most], calibration=texts[most:])
    results: dict[str, Any] = {}
    for drafter, small in DRAFTERS.items():
        folder.note(f"{name} and {drafter} of random weights")
        draft = random_model(small, config.hardware, vocab_size=VOCAB_SIZE, seed=config.seed + 1)
        pair = Pair(target, draft)
        points = points_of(config, pair, prompts, RANDOM, folder, first)
        first += len(points)
        for point in points:
            if "cost_ratio" in point:
                ratios = (point[key] for key in ("cost_ratio", "verify_ratio", "overhead_ratio"))
                tokens = expected_tokens(LIKELY_ALPHA, point["gamma"])
                point["likely_speedup"] = speedup_from_length(tokens, point["gamma"], *ratios)
        results[f"{name}, {drafter}"] = {"points": points, "bandwidth": bandwidth(points, pair)}
    return results


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
    console = Console(width=80, highlight=False)
    for name, measured in {"": summary, **summary["random"]}.items():
        if name:
            console.print(f"Random weights: {name}")
        for table in benchmark_tables(measured["points"]):
            console.print(table)
        memory = measured["bandwidth"]
        if memory["fraction"] is not None:
            console.print(
                f"Plain decoding reads {memory['plain_bytes_per_second'] / 1e9:.1f} GB/s of "
                f"weights, {memory['fraction']:.0%} of a copy's "
                f"{memory['copy_bytes_per_second'] / 1e9:.1f}."
            )
    console.print(LEGEND)
    console.print(
        f"{summary['dtype']}; {summary['compile_seconds']:.0f} s of compiling in no measured time; "
        f"peak memory {summary['peak_memory_bytes'] / 1e9:.2f} GB."
    )


@stage(
    name="benchmark",
    sections=(
        *("seed", "data", "sampling", "decode"),
        *("evaluate.draft", "evaluate.prompts", "evaluate.validation_prompts"),
    ),
    version=2,
    needs=needs,
    check=check_pair,
    product=None,
    after=show,
)
def benchmark(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Measure all settings; the numbers of greedy decoding of one row stand at the top."""
    compiling = -compile_seconds()
    pair, prompts = held_out_pair(config, folder)
    device = pair.target.device.type
    points = points_of(config, pair, prompts, PAIR[device], folder)
    return {
        **headline(points),
        "gamma": config.proposals,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "bandwidth": bandwidth(points, pair),
        "random": random_points(config, folder, len(points)) if device == "cuda" else {},
        "compile_seconds": compiling + compile_seconds(),
        "peak_memory_bytes": peak_memory_bytes(),
        "points": points,
    }


if __name__ == "__main__":
    benchmark.main()
