"""`python -m pipelines.benchmarks.decoder`: the decoder beside Hugging Face and beside the theory.

Times our plain and speculative decoding and Hugging Face's `generate` on one pair, the same
held-out prompts, gamma and precision, in turns, in one process. The pair is the experiment's, its
drafter the one that `evaluate.draft` names.

A *point* is one method in one setting (sampling and batch size). Rates run from the request to the
last token on the host, prefill included, for every method. Methods are compared chunk by chunk. The
prediction is the theory's, tau / (gamma c + v + o), from costs calibrated on other prompts. It
speaks of rounds: what it is held against leaves out the prefill. Greedy answers are compared with
Hugging Face's, token by token.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.costs import calibrate, predicted_speedup
from draftkit.evaluation.intervals import speedup
from draftkit.evaluation.judge import Prompts, proposer_of, timing
from draftkit.evaluation.lossless import decoded_identity, greedy_answers
from draftkit.evaluation.report import interval
from draftkit.evaluation.summary import count_rounds
from draftkit.evaluation.walltime import PLAIN, Setting, Timed, Way, decoding, time_ways
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target, load_draft, load_target
from draftkit.models.memory import peak_bytes
from draftkit.theory.speedup import Costs

from ..command import main
from ..evaluate import drafter_of, prompts_in
from ..plan import CONTEXTS, JUDGED
from ..prepare import check_pair
from ..product import SUMMARY, Stage
from ..stage import StageFolder
from .decoder_peers import hugging_face

SPECULATIVE = "speculative"
HF_PLAIN, HF_ASSISTED, HF_LOOKUP = "hf_plain", "hf_assisted", "hf_lookup"
# By device and batch size the methods that take turns. Hugging Face speculates for one row alone.
BOTH = (PLAIN, SPECULATIVE, HF_PLAIN)
CASES = {
    "cpu": {1: (*BOTH, HF_ASSISTED, HF_LOOKUP), 4: BOTH, 8: BOTH, 16: BOTH},
    "cuda": {1: (*BOTH, HF_ASSISTED), 8: BOTH},
}
COMPILED = {"cpu": (1,), "cuda": (1, 8)}  # batch sizes; the others run eagerly
TEMPERATURES = (0, 1)
PROMPTS = 24  # of a setting; more where a batch size would make too few chunks of them
MIN_CHUNKS = 6  # of a setting: fewer admit no 95 % interval of a median
MAX_NEW_TOKENS = 96
STAGE = Stage(
    name="benchmark",
    code="benchmarks.decoder",
    reads=(
        *("seed", "data", "sampling", "decode"),
        *("evaluate.draft", "evaluate.prompts", "evaluate.validation_prompts"),
    ),
    inputs=(*JUDGED, CONTEXTS),
    version=4,
    product=None,
)
Point = dict[str, Any]

check = check_pair


def benchmark(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Measure all settings; the numbers of greedy decoding of one row stand at the top."""
    compiling = -compile_seconds()
    target = load_target(folder.model(config, "target"), config.hardware)
    adapter = target.adapter
    draft = load_draft(drafter_of(config, folder), target)
    prompts = prompts_in(folder, folder.inputs["contexts"])
    points = points_of(config, target, draft, prompts, folder)
    return {
        **headline(points),
        "gamma": config.proposals,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "compile_seconds": compiling + compile_seconds(),
        "peak_memory_bytes": peak_bytes(adapter.device),
        "points": points,
    }


# What is measured


def points_of(
    config: Config, target: Target, draft: Adapter, prompts: Prompts, folder: StageFolder
) -> list[Point]:
    """Measure every method in every setting.

    Raises ValueError naming `evaluate.prompts` where there are too few for a batch size.
    """
    device = target.adapter.device.type
    texts = [*prompts.test, *prompts.calibration]
    config = replace(config, evaluate=replace(config.evaluate, max_new_tokens=MAX_NEW_TOKENS))
    points: list[Point] = []
    for temperature in TEMPERATURES:
        sampling = replace(config.sampling, temperature=temperature)
        every = timing(texts, sampling, target.eos_token_ids, config)
        for rows, methods in CASES[device].items():
            count, known = max(PROMPTS // rows, MIN_CHUNKS) * rows, rows in COMPILED[device]
            if len(prompts.test) < count:
                raise ValueError(
                    f"evaluate.prompts: {rows} rows need {count} held-out prompts, there are "
                    f"{len(prompts.test)}: raise it"
                )
            folder.note(f"temperature {temperature:g}, batch {rows}: {count} prompts")
            code = {"compiled": every.compiled and known, "captured": every.captured and known}
            setting = replace(every, batch_size=rows, **code)
            some = replace(prompts, test=prompts.test[:count])
            points += measure(config, target.adapter, draft, some, setting, methods)
    return points


# One setting


def measure(
    config: Config,
    target: Adapter,
    draft: Adapter,
    prompts: Prompts,
    setting: Setting,
    names: Sequence[str],
) -> list[Point]:
    """Time the methods `names` on `prompts.test`, in turns; one point for each.

    Speculation is by `decode.proposer`.
    """
    make = partial(proposer_of, target, draft, prompts, config)
    if (tree := make().tree) is not None:
        setting = replace(setting, gamma=tree.depth)
    costs = calibrate(target, make, prompts.calibration, setting)
    makers: dict[str, Callable[[], Way]] = {
        PLAIN: lambda: decoding(target, None, setting),
        SPECULATIVE: lambda: decoding(target, make(), setting),
        HF_PLAIN: lambda: hugging_face(target, setting),
        HF_ASSISTED: lambda: hugging_face(target, setting, assistant=draft),
        HF_LOOKUP: lambda: hugging_face(target, setting, lookup=True),
    }
    timed = time_ways(
        {name: makers[name]() for name in names},
        prompts.test,
        prompts.calibration,
        batch_size=setting.batch_size,
        documents=prompts.documents,
    )
    points = {name: base_point(name, timed, setting) for name in names}
    points[SPECULATIVE] |= prediction(timed, costs)
    if setting.sampling.temperature == 0:
        again = partial(
            greedy_answers,
            target,
            prompts.test,
            max_new_tokens=setting.max_new_tokens,
            eos_token_ids=setting.eos_token_ids,
        )
        for name in (PLAIN, SPECULATIVE):
            identity = decoded_identity(
                target,
                *(timed[HF_PLAIN].completions, timed[name].completions),
                width=1 + (setting.gamma if tree is None else tree.nodes),
                rows=setting.batch_size,
                again=again,
            )
            points[name]["beside_hf"] = identity.as_dict()
    return list(points.values())


def base_point(name: str, timed: Mapping[str, Timed], setting: Setting) -> Point:
    """What every method has: its setting, counts, rate and ratios to the baselines."""
    mine, ours = timed[name], not name.startswith("hf_")
    low, median, high = statistics.quantiles(by_chunk(mine), n=4, method="inclusive")
    return {
        "method": name,
        "temperature": setting.sampling.temperature,
        "batch_size": setting.batch_size,
        "compiled": ours and setting.compiled,
        "captured": ours and setting.captured,
        "prompts": len(mine.completions),
        "chunks": len(mine.chunks),
        "tokens_per_second": {"median": median, "quartiles": [low, high]},
        "ratios": {
            other: paired_ratio(mine, timed[other])
            for other in (PLAIN, HF_PLAIN, HF_ASSISTED)
            if other in timed and other != name
        },
    }


def by_chunk(timed: Timed) -> list[float]:
    """Tokens per second from request to last token."""
    return (timed.answers.totals / timed.answers.counts).tolist()


def paired_ratio(mine: Timed, other: Timed) -> dict[str, Any]:
    """Median over chunks of the ratio of both rates on the same chunk, with its 95 % interval."""
    ratios = [a / b for a, b in zip(by_chunk(mine), by_chunk(other), strict=True)]
    return {"median": statistics.median(ratios), "ci95": median_interval(ratios)}


def median_interval(values: Sequence[float]) -> list[float]:
    """The exact 95 % interval of a median: from the k-th smallest to the k-th largest value.

    k is the largest with P(Binomial(n, 1/2) < k) <= 2.5 %, whatever the law of the values. Fewer
    than 6 of them admit no such interval: then it is their range, which covers less.
    """
    ordered, n = sorted(values), len(values)
    cut, below = 0, 1 + n  # values left out on each side; sets of fewer than cut + 2 of n values
    while below <= 0.025 * 2**n:
        cut += 1
        below += math.comb(n, cut + 1)
    return [ordered[cut], ordered[n - 1 - cut]]


def prediction(timed: Mapping[str, Timed], costs: Costs) -> Point:
    """Acceptance length, calibrated costs, and the speed-up that they predict beside the measured.

    The latter two for the rounds, without the prefill.
    """
    drafted, plain = timed[SPECULATIVE], timed[PLAIN]
    gained = speedup(drafted.rounds, plain.rounds)
    predicted = predicted_speedup(drafted, plain, costs)
    return {
        "gamma": drafted.gamma,
        "acceptance_length": count_rounds(drafted)["acceptance_length"],
        **costs.ratios,
        "speedup": {"measured": gained.mean, "ci95": gained.ci95, "predicted": predicted},
        "prediction_error": gained.mean / predicted - 1,
    }


def headline(points: Sequence[Point]) -> dict[str, Any]:
    """The numbers of greedy decoding of a single row, which stands first."""
    plain, drafted, *_ = points
    ratios = {name: ratio["median"] for name, ratio in drafted["ratios"].items()}
    return {
        **{f"ratio_to_{name}": ratios[name] for name in (PLAIN, HF_ASSISTED, HF_PLAIN)},
        "plain_ratio_to_hf_plain": plain["ratios"][HF_PLAIN]["median"],
        "acceptance_length": drafted["acceptance_length"],
        "prediction_error": drafted["prediction_error"],
    }


# What is shown


def show(config: Config, folder: Path) -> None:
    """Print a table for each setting of a complete benchmark."""
    summary, console = read_json(folder / SUMMARY), Console(width=80, highlight=False)
    show_points(summary["points"], console)
    console.print(
        "HF: generate of Hugging Face. Medians over chunks, prefill included; with quartiles, or "
        f"95 % intervals of paired ratios. {summary['dtype']}; peak memory "
        f"{summary['peak_memory_bytes'] / 1e9:.2f} GB; {summary['compile_seconds']:.0f} s of "
        "compiling in no measured time."
    )


def show_points(points: Sequence[Point], console: Console) -> None:
    """One table for each setting, every method a row, with what else is known below."""
    for (temperature, rows), group in groupby(points, itemgetter("temperature", "batch_size")):
        some = [*group]
        sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        kind = next((kind for kind in ("compiled", "captured") if some[0][kind]), "eager")
        counts = f"{some[0]['prompts']} prompts in {some[0]['chunks']} chunks"
        console.print(f"{sampling}, batch {rows}, {kind}: {counts}")
        console.print(f"  {'':<18}{'tokens/s':<19}{'x plain':<20}x HF plain")
        for point in some:
            rate, ratios = point["tokens_per_second"], point["ratios"]
            low, high = rate["quartiles"]
            plain, other = (
                interval({"mean": one["median"], **one}, 2) if (one := ratios.get(name)) else ""
                for name in (PLAIN, HF_PLAIN)
            )
            rates = f"{rate['median']:.0f} [{low:.0f}, {high:.0f}]"
            row = f"  {named(point['method']):<18}{rates:<19}{plain:<20}{other}"
            console.print(row.rstrip())
        for line in (line for point in some for line in remarks(point)):
            console.print(f"    {line}")


def named(method: str) -> str:
    return method.replace("hf_", "HF ").replace("lookup", "prompt lookup")


def remarks(point: Point) -> Iterator[str]:
    """What else is known of a point, a line each."""
    if "acceptance_length" in point:
        speedup = point["speedup"]
        yield (
            f"gamma {point['gamma']}, tau {interval(point['acceptance_length'], 2)}, "
            f"c {point['cost_ratio']:.3f}, v {point['verify_ratio']:.2f}, "
            f"o {point['overhead_ratio']:.3f}"
        )
        yield (
            f"rounds alone: predicted {speedup['predicted']:.2f}, "
            f"measured {speedup['measured']:.2f} ({point['prediction_error']:+.1%})"
        )
    if "beside_hf" in point:
        same = point["beside_hf"]
        yield (
            f"{named(point['method'])} = HF plain: {same['compared'] - same['statistic']} of "
            f"{same['compared']} answers, {same['near_ties']} near-ties, "
            f"{same['statistic'] - same['near_ties']} different"
        )


if __name__ == "__main__":
    main(STAGE)
