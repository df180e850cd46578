"""`python -m pipelines.benchmarks.decoder`: the decoder beside Hugging Face and beside the theory.

Times our plain and speculative decoding and Hugging Face's `generate` on one pair, the same
held-out prompts, gamma and precision, in turns, in one process. The pair is the experiment's, its
drafter the one that `evaluate.draft` names. On CUDA models of random weights follow, an 8 B shape
with each of its drafters, for speed alone.

A *point* is one method in one setting (sampling and batch size). Rates run from the request to the
last token on the host, prefill included, for every method. Methods are compared chunk by chunk. The
prediction is the theory's, tau / (gamma c + v + o), from costs calibrated on other prompts. It
speaks of rounds of full batches: what it is held against leaves out the prefill and the rounds
behind the first end of a row. Greedy answers are compared with Hugging Face's, token by token.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.costs import Meter, between, meter
from draftkit.evaluation.judge import Prompts, proposer_of
from draftkit.evaluation.lossless import differ_by_rounding, differing
from draftkit.evaluation.summary import count_rounds
from draftkit.evaluation.walltime import (
    PLAIN,
    Method,
    Setting,
    Timed,
    decoding,
    row_capacity,
    take_turns,
    warm_up,
)
from draftkit.models.adapter import Adapter
from draftkit.models.devices import resolve_device
from draftkit.models.loading import load_draft, load_target
from draftkit.models.memory import peak_bytes
from draftkit.theory.acceptance import speedup
from draftkit.theory.speedup import Costs, expected_tokens, speedup_from_length

from ..command import main
from ..evaluate import drafts_of, prompts_in
from ..plan import CONTEXTS, JUDGED
from ..prepare import check_pair
from ..product import SUMMARY, Stage
from ..stage import StageFolder
from .decoder_peers import hugging_face
from .decoder_report import (
    ADAPTIVE,
    HF_ASSISTED,
    HF_LOOKUP,
    HF_PLAIN,
    SPECULATIVE,
    Point,
    print_summary,
)
from .random_models import DRAFTERS, LIKELY_ALPHA, TARGET, random_model, random_texts

# By device and batch size the methods that take turns. Hugging Face speculates for one row alone,
# an adaptive gamma is for many.
BOTH = (PLAIN, SPECULATIVE, HF_PLAIN)
CASES = {
    "cpu": {
        1: (*BOTH, HF_ASSISTED, HF_LOOKUP),
        4: BOTH,
        8: (PLAIN, SPECULATIVE, ADAPTIVE, HF_PLAIN),
        16: (PLAIN, SPECULATIVE, ADAPTIVE, HF_PLAIN),
    },
    "cuda": {1: (*BOTH, HF_ASSISTED), 8: BOTH},
}
COMPILED = {"cpu": (1,), "cuda": (1, 8)}  # batch sizes; the others run eagerly
TEMPERATURES = (0, 1)
PROMPTS = 24  # of a setting; more where a batch size would make too few chunks of them
MIN_CHUNKS = 6  # of a setting: fewer admit no 95 % interval of a median
MAX_NEW_TOKENS = 96
POLICY_TURNS = 3  # of calibration, before the timed chunks, for the adaptive gamma
RANDOM_PROMPT_TOKENS, RANDOM_CALIBRATION_PROMPTS = 32, 8
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


def check(config: Config) -> None:
    """Raise ValueError for a pair that does not fit together, and a device that is not there."""
    check_pair(config)
    resolve_device(config.hardware)


def benchmark(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Measure all settings; the numbers of greedy decoding of one row stand at the top."""
    compiling = -compile_seconds()
    target = load_target(folder.model(config, "target"), config.hardware)
    adapter = target.adapter
    draft = load_draft(list(drafts_of(config, folder).values())[-1], target)
    prompts = prompts_in(folder, folder.input("contexts"))
    points = points_of(config, adapter, draft, prompts, folder, ends=target.eos_token_ids)
    return {
        **headline(points),
        "gamma": config.proposals,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "random": random_points(config, folder) if adapter.device.type == "cuda" else {},
        "compile_seconds": compiling + compile_seconds(),
        "peak_memory_bytes": peak_bytes(adapter.device),
        "points": points,
    }


def show(config: Config, folder: Path) -> None:
    """Print the tables of a complete benchmark."""
    print_summary(read_json(folder / SUMMARY), Console(width=80, highlight=False))


# What is measured


def prompts_of(batch_size: int) -> int:
    """How many prompts a setting takes."""
    return max(PROMPTS // batch_size, MIN_CHUNKS) * batch_size


def points_of(
    config: Config,
    target: Adapter,
    draft: Adapter,
    prompts: Prompts,
    folder: StageFolder,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    ends: Sequence[int] = (),
) -> list[Point]:
    """Measure every method in every setting. ends: ids that end a text.

    Raises ValueError naming `evaluate.prompts` where there are too few for a batch size.
    """
    decode, device, gamma = config.decode, target.device.type, config.proposals
    texts, available = [*prompts.test, *prompts.calibration], len(prompts.test)
    capacity = row_capacity(texts, max_new_tokens=MAX_NEW_TOKENS, gamma=gamma)
    points: list[Point] = []
    for temperature in temperatures:
        for rows, methods in CASES[device].items():
            if available < 2 * rows:
                raise ValueError(
                    f"evaluate.prompts: {rows} rows need {2 * rows} held-out prompts, there are "
                    f"{available}: raise it"
                )
            count = min(prompts_of(rows), available // rows * rows)
            setting = Setting(
                sampling=replace(config.sampling, temperature=temperature),
                max_new_tokens=MAX_NEW_TOKENS,
                gamma=gamma,
                verification=decode.verification,
                batch_size=rows,
                capacity=capacity,
                eos_token_ids=ends,
                seed=config.seed,
                compiled=decode.compiles and rows in COMPILED[device],
                captured=decode.captures and rows in COMPILED[device],
            )
            folder.note(f"temperature {temperature:g}, batch {rows}: {count} prompts")
            some = replace(prompts, test=prompts.test[:count])
            points += measure(config, target, draft, some, setting, methods)
    return points


def random_points(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Points of `TARGET` with each of `DRAFTERS`, all of random weights.

    What such models agree on means nothing; what a round costs does not depend on it. So a summary
    holds the speed-up that these costs give one row at `LIKELY_ALPHA`.
    """
    name, shape = TARGET
    target = random_model(shape, config.hardware, seed=config.seed)
    most = max(map(prompts_of, CASES[target.device.type]))
    texts = random_texts(
        most + RANDOM_CALIBRATION_PROMPTS,
        RANDOM_PROMPT_TOKENS,
        vocab_size=shape.vocab_size,
        seed=config.seed,
    )
    prompts, results = Prompts(test=texts[:most], calibration=texts[most:]), {}
    for drafter, small in DRAFTERS.items():
        folder.note(f"{name} and {drafter} of random weights")
        draft = random_model(small, config.hardware, seed=config.seed + 1)
        points = points_of(config, target, draft, prompts, folder, temperatures=(1,))
        plain, drafted, *_ = points  # of one row, which stands first
        ratios = (drafted[key] for key in ("cost_ratio", "verify_ratio", "overhead_ratio"))
        tokens = expected_tokens(LIKELY_ALPHA, drafted["gamma"])
        results[f"{name}, {drafter}"] = {
            "points": points,
            "likely_speedup": speedup_from_length(tokens, drafted["gamma"], *ratios),
            # A step reads all weights once.
            "weight_bytes_per_second": target.weight_bytes * plain["without_prefill"],
        }
    return results


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
    costs = meter(target, make, prompts.calibration, setting)
    makers: dict[str, Callable[[], Method]] = {
        PLAIN: lambda: decoding(target, None, setting),
        SPECULATIVE: lambda: decoding(target, make(), setting),
        ADAPTIVE: lambda: decoding(target, make(), setting, policy_by(costs, setting)),
        HF_PLAIN: lambda: hugging_face(target, setting),
        HF_ASSISTED: lambda: hugging_face(target, setting, assistant=draft),
        HF_LOOKUP: lambda: hugging_face(target, setting, lookup=True),
    }
    methods = {name: makers[name]() for name in names}
    warm_up(methods, prompts.calibration, setting, drafted=(SPECULATIVE, ADAPTIVE))
    timed = take_turns(
        methods, prompts.test, setting, between([costs]), documents=prompts.documents
    )
    points = {name: base_point(name, timed, setting) for name in names}
    points[SPECULATIVE] |= prediction(timed, costs.costs(), setting)
    if setting.sampling.temperature == 0:
        for name in points.keys() & {PLAIN, SPECULATIVE, ADAPTIVE}:
            sides = (timed[name], timed[HF_PLAIN])
            points[name]["beside_hf"] = greedy_agreement(target, *sides, setting)
    return list(points.values())


def policy_by(costs: Meter, setting: Setting) -> AdaptiveGamma:
    """The gamma that pays by `costs`, of which some are measured first."""
    costs.turn(POLICY_TURNS)
    return AdaptiveGamma({setting.batch_size: costs.costs()})


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
        "without_prefill": mine.rounds.mean if ours else None,  # theirs is not known
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


def prediction(timed: Mapping[str, Timed], costs: Costs, setting: Setting) -> Point:
    """Acceptance length, calibrated costs, and the speed-up that they predict beside the measured.

    The latter two for the rounds of full batches, and `full_length` is the acceptance length there.
    """
    drafted = timed[SPECULATIVE]
    gained = speedup(drafted.full_batches, timed[PLAIN].full_batches)
    predicted = speedup_from_length(drafted.full_length, setting.gamma, **costs.ratios)
    return {
        "gamma": setting.gamma,
        "acceptance_length": count_rounds(drafted)["acceptance_length"],
        "full_length": drafted.full_length,
        **costs.ratios,
        "speedup": {"measured": gained.mean, "ci95": gained.ci95, "predicted": predicted},
        "prediction_error": gained.mean / predicted - 1,
    }


def greedy_agreement(
    target: Adapter, ours: Timed, theirs: Timed, setting: Setting
) -> dict[str, int]:
    """How many answers are the same, and how the others part: by a near-tie, or not.

    Near-ties are told by `lossless`, which reads their text in passes of the shapes of both.
    """
    rows = setting.batch_size
    shapes = ((1, rows), (1, 1), (setting.gamma + 1, rows))
    parted = differing(theirs.completions, ours.completions)
    ties = sum(differ_by_rounding(target, parted, shapes))
    return {
        "compared": len(ours.completions),
        "identical": len(ours.completions) - len(parted),
        "near_ties": ties,
        "different": len(parted) - ties,
    }


def headline(points: Sequence[Point]) -> dict[str, Any]:
    """The numbers of greedy decoding of a single row, which every benchmark measures."""
    alone = {
        point["method"]: point
        for point in points
        if point["batch_size"] == 1 and point["temperature"] == 0
    }
    plain, drafted = alone[PLAIN], alone[SPECULATIVE]
    ratios = {name: ratio["median"] for name, ratio in drafted["ratios"].items()}
    return {
        "ratio_to_plain": ratios[PLAIN],
        "ratio_to_hf_assisted": ratios[HF_ASSISTED],
        "ratio_to_hf_plain": ratios[HF_PLAIN],
        "plain_ratio_to_hf_plain": plain["ratios"][HF_PLAIN]["median"],
        "acceptance_length": drafted["acceptance_length"],
        "prediction_error": drafted["prediction_error"],
    }


if __name__ == "__main__":
    main(STAGE)
