"""`python -m pipelines.benchmarks.decoder`: the decoder beside Hugging Face and beside the theory.

Times our plain and speculative decoding and Hugging Face's `generate` on one pair, the same
held-out prompts, gamma and precision, in turns, in one process (how: `decoder_points.py`). The pair
is the experiment's, its drafter the one that `evaluate.draft` names. On CUDA models of random
weights follow, an 8 B shape with each of its drafters, for speed and bandwidth alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.judge import Prompts
from draftkit.evaluation.report import interval
from draftkit.evaluation.walltime import PLAIN, Setting, row_capacity
from draftkit.models.adapter import CausalAdapter
from draftkit.models.devices import resolve_device
from draftkit.models.loading import load_draft, load_target
from draftkit.models.memory import peak_bytes
from draftkit.theory.speedup import expected_tokens, speedup_from_length

from ..command import main
from ..evaluate import drafts_of, prompts_in
from ..plan import CONTEXTS, JUDGED
from ..prepare import check_pair
from ..product import Stage
from ..stage import StageFolder
from .decoder_points import (
    ADAPTIVE,
    HF_ASSISTED,
    HF_LOOKUP,
    HF_PLAIN,
    SPECULATIVE,
    Point,
    applicable,
    headline,
    measure,
)
from .random_models import DRAFTERS, TARGET, random_model, random_texts
from .timing import copy_bandwidth

# The methods that take turns, as tables call them, and where: a GPU is lent for minutes.
METHODS = {
    PLAIN: "plain",
    SPECULATIVE: "speculative",
    ADAPTIVE: "adaptive gamma",
    HF_PLAIN: "HF plain",
    HF_ASSISTED: "HF assisted",
    HF_LOOKUP: "HF prompt lookup",
}
ON_CUDA = (PLAIN, SPECULATIVE, HF_PLAIN, HF_ASSISTED)
TEMPERATURES = (0, 1)
BATCH_SIZES = {"cpu": (1, 4, 8, 16), "cuda": (1, 8)}
COMPILED_BATCH_SIZES = {"cpu": (1,), "cuda": (1, 8)}  # the rest runs eagerly
PROMPTS = 24  # of a setting; more where a batch size would make too few chunks of them
MIN_CHUNKS = 6  # of a setting: fewer admit no 95 % interval of a median
MAX_NEW_TOKENS = 96
RANDOM_PROMPT_TOKENS, RANDOM_CALIBRATION_PROMPTS = 32, 8
LIKELY_ALPHA = 0.8  # for which the measured costs of random models are turned into a speed-up
STAGE = Stage(
    name="benchmark",
    code="benchmarks.decoder",
    reads=(
        *("seed", "data", "sampling", "decode"),
        *("evaluate.draft", "evaluate.prompts", "evaluate.validation_prompts"),
    ),
    inputs=(*JUDGED, CONTEXTS),
    version=3,
    product=None,
)
LEGEND = (
    "HF: Hugging Face generate; all else is this decoder. Tokens per second from request to last "
    "token, prefill included: medians over chunks with quartiles. Ratios: medians of paired "
    "chunks with exact 95 % intervals."
)


def check(config: Config) -> None:
    """Raise ValueError for a pair that does not fit together, and a device that is not there."""
    check_pair(config)
    resolve_device(config.hardware)


def prompts_of(batch_size: int) -> int:
    """How many prompts a setting takes."""
    return max(PROMPTS // batch_size, MIN_CHUNKS) * batch_size


def points_of(
    config: Config,
    target: CausalAdapter,
    draft: CausalAdapter,
    prompts: Prompts,
    folder: StageFolder,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    eos_token_ids: Sequence[int] = (),
) -> list[Point]:
    """Measure every method in every setting.

    Raises ValueError naming `evaluate.prompts` where there are too few for a batch size.
    """
    decode, device = config.decode, target.device.type
    names = ON_CUDA if device == "cuda" else tuple(METHODS)
    points: list[Point] = []
    for temperature in temperatures:
        for size in BATCH_SIZES[device]:
            available, fixed = len(prompts.test), size in COMPILED_BATCH_SIZES[device]
            if available < 2 * size:
                raise ValueError(
                    f"evaluate.prompts: {size} rows need {2 * size} held-out prompts, there are "
                    f"{available}: raise it"
                )
            count = min(prompts_of(size), available // size * size)
            some = replace(prompts, test=prompts.test[:count], documents=prompts.documents[:count])
            texts = [*prompts.test, *prompts.calibration]
            setting = Setting(
                sampling=replace(config.sampling, temperature=temperature),
                max_new_tokens=MAX_NEW_TOKENS,
                gamma=config.proposals,
                verification=decode.verification,
                batch_size=size,
                capacity=row_capacity(texts, max_new_tokens=MAX_NEW_TOKENS, gamma=config.proposals),
                eos_token_ids=eos_token_ids,
                seed=config.seed,
                compiled=decode.compiles and fixed,
                captured=decode.captures and fixed,
            )
            folder.note(f"temperature {temperature:g}, batch {size}: {count} prompts")
            methods = applicable(names, size)
            points += measure(target, draft, some, setting, methods, proposer=decode.proposer)
    return points


def random_points(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Points and bandwidth of `TARGET` with each of `DRAFTERS`, all of random weights.

    What such models agree on means nothing; what a round costs does not depend on it. So a summary
    holds the speed-up that these costs give one row at `LIKELY_ALPHA`.
    """
    name, shape = TARGET
    target = random_model(shape, config.hardware, seed=config.seed)
    most = max(map(prompts_of, BATCH_SIZES[target.device.type]))
    texts = random_texts(
        most + RANDOM_CALIBRATION_PROMPTS,
        RANDOM_PROMPT_TOKENS,
        vocab_size=shape.vocab_size,
        seed=config.seed,
    )
    prompts = Prompts(test=texts[:most], calibration=texts[most:])
    copied, results = copy_bandwidth(target.device), {}
    for drafter, small in DRAFTERS.items():
        folder.note(f"{name} and {drafter} of random weights")
        draft = random_model(small, config.hardware, seed=config.seed + 1)
        points = points_of(config, target, draft, prompts, folder, temperatures=(1,))
        # Plain and speculative decoding of one row, which stand first.
        plain, drafted, *_ = points
        ratios = (drafted[key] for key in ("cost_ratio", "verify_ratio", "overhead_ratio"))
        tokens = expected_tokens(LIKELY_ALPHA, drafted["gamma"])
        read = target.weight_bytes * plain["without_prefill"]  # all weights once a token
        results[f"{name}, {drafter}"] = {
            "points": points,
            "likely_speedup": speedup_from_length(tokens, drafted["gamma"], *ratios),
            "weight_bytes_per_second": read,
            "copy_bytes_per_second": copied,
            "fraction_of_copy": read / copied,
        }
    return results


def show(config: Config, folder: Path) -> None:
    """Print the tables of a complete benchmark."""
    summary = read_json(folder / "summary.json")
    console = Console(width=80, highlight=False)
    print_points(console, summary["points"])
    for name, measured in summary["random"].items():
        console.print(f"Random weights: {name}")
        print_points(console, measured["points"])
        console.print(
            f"Plain decoding of one row reads {measured['weight_bytes_per_second'] / 1e9:.1f} "
            f"GB/s of weights, {measured['fraction_of_copy']:.0%} of a copy's; its costs give "
            f"{measured['likely_speedup']:.2f} at an acceptance of {LIKELY_ALPHA}."
        )
    console.print(LEGEND)
    console.print(
        f"{summary['dtype']}; {summary['compile_seconds']:.0f} s of compiling in no measured time; "
        f"peak memory {summary['peak_memory_bytes'] / 1e9:.2f} GB."
    )


def print_points(console: Console, points: Sequence[Point]) -> None:
    """One table for each setting, every method a row."""
    for _, group in groupby(points, lambda point: (point["temperature"], point["batch_size"])):
        console.print(setting_table(list(group)))


def setting_table(points: Sequence[Point]) -> Table:
    """The methods of one setting, with the prediction and the comparison of answers below."""
    first, temperature = points[0], points[0]["temperature"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    kind = next((kind for kind in ("compiled", "captured") if first[kind]), "eager")
    table = Table(
        title=f"{sampling}, batch {first['batch_size']}, {kind}: "
        f"{first['prompts']} prompts in {first['chunks']} chunks",
        caption="\n".join(line for point in points for line in remarks(point)),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "x plain", "x HF plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        rate, ratios = point["tokens_per_second"], point["ratios"]
        low, high = rate["quartiles"]
        cells = [f"{rate['median']:.0f} [{low:.0f}, {high:.0f}]"]
        for other in (PLAIN, HF_PLAIN):
            ratio = ratios.get(other)
            cells.append(interval({"mean": ratio["median"], **ratio}, 2) if ratio else "")
        table.add_row(METHODS[point["method"]], *cells)
    return table


def remarks(point: Point) -> Iterator[str]:
    """What else is known of a point, a line each."""
    if "acceptance_length" in point:
        speedup = point["speedup"]
        yield (
            f"gamma {point['gamma']}, tau {interval(point['acceptance_length'], 2)}, "
            f"c {point['cost_ratio']:.3f}, v {point['verify_ratio']:.2f}, "
            f"o {point['overhead_ratio']:.3f}"
        )
        of = "" if point["batch_size"] == 1 else f" of full batches, tau {point['full_length']:.2f}"
        yield (
            f"rounds alone{of}: predicted {speedup['predicted']:.2f}, "
            f"measured {speedup['measured']:.2f} ({point['prediction_error']:+.1%})"
        )
    if "beside_hf" in point:
        same = point["beside_hf"]
        yield (
            f"{METHODS[point['method']]} = HF plain: {same['identical']} of {same['compared']} "
            f"answers, {same['near_ties']} near-ties, {same['different']} different"
        )


def benchmark(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Measure all settings; the numbers of greedy decoding of one row stand at the top."""
    compiling = -compile_seconds()
    target = load_target(folder.model(config, "target"), config.hardware)
    draft = load_draft(list(drafts_of(config, folder).values())[-1], target)
    prompts = prompts_in(folder, folder.input("contexts"))
    ends, on_cuda = target.eos_token_ids, target.adapter.device.type == "cuda"
    points = points_of(config, target.adapter, draft, prompts, folder, eos_token_ids=ends)
    for step, point in enumerate(points):
        shown = {key: point[key] for key in ("temperature", "batch_size")}
        shown["tokens_per_second"] = point["tokens_per_second"]["median"]
        folder.tracker.log(f"benchmark_{point['method']}", step, shown)
    return {
        **headline(points),
        "gamma": config.proposals,
        "dtype": str(target.adapter.dtype).removeprefix("torch."),
        "random": random_points(config, folder) if on_cuda else {},
        "compile_seconds": compiling + compile_seconds(),
        "peak_memory_bytes": peak_bytes(target.adapter.device),
        "points": points,
    }


if __name__ == "__main__":
    main(STAGE)
