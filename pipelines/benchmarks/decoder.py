"""`python -m pipelines.benchmarks.decoder`: the decoder beside Hugging Face and beside the theory.

Times our plain and speculative decoding and Hugging Face's `generate` on one pair, the same
held-out prompts, gamma and precision, in turns, in one process. The pair is the experiment's, its
drafter the one that `evaluate.draft` names.

A *point* is one method in one setting (sampling and batch size). Rates run from the request to the
last token on the host, prefill included, for every method. Rates and their ratios are of totals,
with 95 % intervals over documents, or chunks where rows are decoded together, as `evaluate` states
them. The prediction is the theory's, tau / (gamma c + v + o), from costs calibrated on other
prompts. It speaks of rounds: what it is held against leaves out the prefill. Greedy answers are
compared with Hugging Face's, token by token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.decoding.catalogue import proposer_of
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.costs import calibrate, predicted_speedup
from draftkit.evaluation.intervals import LEAST_UNITS, estimate, speedup
from draftkit.evaluation.lossless import decoded_identity, greedy_answers
from draftkit.evaluation.measure import Prompts, timing
from draftkit.evaluation.summary import count_rounds
from draftkit.evaluation.walltime import (
    PLAIN,
    Setting,
    Timed,
    decoding,
    make_decoder,
    time_ways,
)
from draftkit.models.adapter import Adapter
from draftkit.models.devices import peak_bytes
from draftkit.models.loading import Target, load_draft, load_target
from draftkit.templates import interval
from draftkit.theory.speedup import Costs

from ..command import main
from ..evaluate import drafter_of, prompts_in
from ..plan import CONTEXTS, JUDGED
from ..prepare import check_pair
from ..product import SUMMARY, Stage
from ..stage import StageFolder
from .decoder_peers import hugging_face

SPECULATIVE = "speculative"
HF_PLAIN, HF_STATIC = "hf_plain", "hf_static"
HF_ASSISTED, HF_LOOKUP = "hf_assisted", "hf_lookup"
# By device and batch size the methods that take turns. Hugging Face speculates for one row alone.
BOTH = (PLAIN, SPECULATIVE, HF_PLAIN)
CASES = {
    "cpu": {1: (*BOTH, HF_STATIC, HF_ASSISTED, HF_LOOKUP), 4: BOTH, 8: BOTH, 16: BOTH},
    "cuda": {1: (*BOTH, HF_STATIC, HF_ASSISTED), 8: (*BOTH, HF_STATIC)},
}
COMPILED = {"cpu": (1, 4, 8), "cuda": (1, 8)}  # batch sizes; the others run eagerly
TEMPERATURES = (0, 1)
CHUNKS = 24  # of a setting, as far as there are prompts: an interval needs 20 documents
MIN_CHUNKS = 6
MAX_NEW_TOKENS = 96
STAGE = Stage(
    name="benchmark",
    code="benchmarks.decoder",
    reads=(
        *("seed", "data", "sampling", "decode"),
        *("evaluate.draft", "evaluate.prompts", "evaluate.validation_prompts"),
    ),
    inputs=(*JUDGED, CONTEXTS),
    version=6,
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
    plain, drafted, *_ = points
    ratios = {name: ratio["mean"] for name, ratio in drafted["ratios"].items()}
    return {
        **{f"ratio_to_{name}": ratios[name] for name in (PLAIN, HF_ASSISTED, HF_PLAIN)},
        "plain_ratio_to_hf_plain": plain["ratios"][HF_PLAIN]["mean"],
        "acceptance_length": drafted["acceptance_length"],
        "prediction_error": drafted["prediction_error"],
        "gamma": config.proposals,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "compile_seconds": compiling + compile_seconds(),
        "peak_memory_bytes": peak_bytes(adapter.device),
        "points": points,
    }


def points_of(
    config: Config, target: Target, draft: Adapter, prompts: Prompts, folder: StageFolder
) -> list[Point]:
    """Measure every method in every setting.

    Raises ValueError naming `evaluate.prompts` where there are too few for a batch size.
    """
    device, held_out = target.adapter.device.type, len(prompts.test)
    texts = [*prompts.test, *prompts.calibration]
    config = replace(config, evaluate=replace(config.evaluate, max_new_tokens=MAX_NEW_TOKENS))
    points: list[Point] = []
    for temperature in TEMPERATURES:
        sampling = replace(config.sampling, temperature=temperature)
        every = timing(texts, sampling, target.eos_token_ids, config)
        for rows, methods in CASES[device].items():
            if held_out < MIN_CHUNKS * rows:
                raise ValueError(
                    f"evaluate.prompts: {rows} rows need {MIN_CHUNKS * rows} held-out prompts, "
                    f"there are {held_out}: raise it"
                )
            count, known = min(CHUNKS, held_out // rows) * rows, rows in COMPILED[device]
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
    proposer = proposer_of(config, lambda: draft, prompts.counted, target)
    if (tree := proposer.tree) is not None:
        setting = replace(setting, gamma=tree.depth)
    plain, drafted = (make_decoder(target, one, setting) for one in (None, proposer))
    costs = calibrate(plain, drafted, prompts.calibration, setting)
    ways = {
        PLAIN: decoding(plain, setting),
        SPECULATIVE: decoding(drafted, setting, setting.gamma),
        HF_PLAIN: hugging_face(target, setting),
        HF_STATIC: hugging_face(target, setting, static=True),
        HF_ASSISTED: hugging_face(target, setting, assistant=draft),
        HF_LOOKUP: hugging_face(target, setting, lookup=True),
    }
    timed = time_ways(
        {name: ways[name] for name in names},
        prompts.test,
        prompts.calibration,
        batch_size=setting.batch_size,
        documents=prompts.documents,
    )
    points = {name: base_point(name, timed, setting) for name in names}
    points[SPECULATIVE] |= prediction(timed[SPECULATIVE], timed[PLAIN], costs)
    if setting.sampling.temperature == 0:
        again = cache(
            partial(
                greedy_answers,
                target,
                prompts.test,
                max_new_tokens=setting.max_new_tokens,
                eos_token_ids=setting.eos_token_ids,
            )
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
    return {
        "method": name,
        "temperature": setting.sampling.temperature,
        "batch_size": setting.batch_size,
        "compiled": ours and setting.compiled,
        "captured": ours and setting.captured,
        "prompts": len(mine.completions),
        "chunks": len(mine.chunks),
        "tokens_per_second": estimate(mine.answers).as_dict(),
        "ratios": {
            other: speedup(mine.answers, timed[other].answers).as_dict()
            for other in (PLAIN, HF_PLAIN, HF_ASSISTED)
            if other in timed and other != name
        },
    }


def prediction(drafted: Timed, plain: Timed, costs: Costs) -> Point:
    """Acceptance length, calibrated costs, and the speed-up that they predict beside the measured.

    The latter two for the rounds, without the prefill.
    """
    gained = speedup(drafted.rounds, plain.rounds)
    predicted = predicted_speedup(drafted, plain, costs)
    return {
        "gamma": drafted.gamma,
        "acceptance_length": count_rounds(drafted)["acceptance_length"],
        **costs.ratios,
        "speedup": {"measured": gained.mean, "ci95": gained.ci95, "predicted": predicted},
        "prediction_error": gained.mean / predicted - 1,
    }


# What is shown


def show(config: Config, folder: Path) -> None:
    """Print a table for each setting of a complete benchmark, with what else is known below."""
    summary, console = read_json(folder / SUMMARY), Console(width=80, highlight=False)
    setting = itemgetter("temperature", "batch_size")
    for (temperature, rows), group in groupby(summary["points"], setting):
        points = [*group]
        sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        kind = next((kind for kind in ("compiled", "captured") if points[0][kind]), "eager")
        counts = f"{points[0]['prompts']} prompts in {points[0]['chunks']} chunks"
        console.print(f"{sampling}, batch {rows}, {kind}: {counts}")
        console.print(f"  {'':<18}{'tokens/s':<19}{'x plain':<20}x HF plain")
        below = list[str]()
        for point in points:
            name = point["method"].replace("hf_", "HF ").replace("lookup", "prompt lookup")
            rate, ratios = interval(point["tokens_per_second"], 0), point["ratios"]
            plain, other = (
                interval(ratios[base], 2) if base in ratios else "" for base in (PLAIN, HF_PLAIN)
            )
            console.print(f"  {name:<18}{rate:<19}{plain:<20}{other}".rstrip())
            if "acceptance_length" in point:
                rounds = point["speedup"]
                below += [
                    f"gamma {point['gamma']}, tau {interval(point['acceptance_length'], 2)}, "
                    f"c {point['cost_ratio']:.3f}, v {point['verify_ratio']:.2f}, "
                    f"o {point['overhead_ratio']:.3f}",
                    f"rounds alone: predicted {rounds['predicted']:.2f}, "
                    f"measured {rounds['measured']:.2f} ({point['prediction_error']:+.1%})",
                ]
            if "beside_hf" in point:
                same = point["beside_hf"]
                below.append(
                    f"{name} = HF plain: {same['compared'] - same['statistic']} of "
                    f"{same['compared']} answers, {same['near_ties']} near-ties, "
                    f"{same['statistic'] - same['near_ties']} different"
                )
        for line in below:
            console.print(f"    {line}")
    console.print(
        "HF: generate of Hugging Face. Tokens over seconds, prefill included, with 95 % intervals "
        f"where there are {LEAST_UNITS} documents, or chunks of several rows. {summary['dtype']}; "
        f"peak memory {summary['peak_memory_bytes'] / 1e9:.2f} GB; "
        f"{summary['compile_seconds']:.0f} s of "
        "compiling in no measured time."
    )


if __name__ == "__main__":
    main(STAGE)
