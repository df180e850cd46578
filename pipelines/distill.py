"""`python -m pipelines.distill`: train a drafter towards its target, judge it, print one table.

Starts from `draft.path` (or the base drafter of `prepare`), learns by `divergence` on the
sequences of `source`, keeps the weights with the best validation alpha, and ends with `evaluate`.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.evaluation.alpha import MODES
from draftkit.evaluation.report import evaluation_table, training_figure
from draftkit.tracking import FILE_NAME, read_metrics
from pipelines.evaluate import check_gamma, check_prompts, evaluate
from pipelines.fitting import fit
from pipelines.generate import ROLLOUT_SETTINGS
from pipelines.inputs import pair_hashes
from pipelines.memory import peak_memory_bytes
from pipelines.sources import decoding_hash
from pipelines.stage import StageFolder, stage

DRAFT = "draft"


def inputs(config: Config) -> dict[str, str]:
    """Checksums of the pair and the text, after a look at what no single section can check."""
    check_gamma(config)
    temperature, served = config.training_temperature, config.sampling.temperature
    if temperature != served and config.divergence.name != "ce_argmax":
        print(f"distill: the loss is taken at temperature {temperature:g}, served is {served:g}")
    return {**decoding_hash(config), **pair_hashes(config)}


def judge(config: Config) -> dict[str, Any]:
    """Evaluate what was trained beside what it started from; the keys of `distill`'s summary."""
    judged = read_json(evaluate.ensure(config) / "summary.json")
    summary: dict[str, Any] = {"verdict": judged["verdict"]}
    for mode in MODES:
        summary[f"{mode}_before"] = judged["before"][mode]
        summary[f"{mode}_after"] = judged[mode]
        summary[f"{mode}_gain"] = judged[f"{mode}_gain"]
    return summary


def show(config: Config, folder: Path) -> None:
    """Print the table of the evaluation that ended the run."""
    Console(width=80).print(evaluation_table(read_json(evaluate.ensure(config) / "summary.json")))


@stage(
    sections=(
        "seed",
        "data",
        "sampling",
        "divergence",
        "source",
        *ROLLOUT_SETTINGS,
        "generate.top_k",
        "optim",
        "draft.lora",
        "draft.freeze_head",
        "evaluate.validation_prompts",
        "evaluate.max_new_tokens",
    ),
    inputs=inputs,
    after=show,
)
def distill(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Train, then judge against the starting drafter on the test split."""
    check_prompts(config)
    fitted = fit(config, folder)
    outcome, rates = fitted.outcome, fitted.alpha_by_rate
    if folder.is_main:
        fitted.save(folder.path / DRAFT)
        training_figure(read_metrics(folder.path / FILE_NAME), folder.path / "training.png")
    PartialState().wait_for_everyone()  # all judge what the first process has saved
    folder.tracker.figure("train/curves", folder.path / "training.png")
    if outcome.best_step == 0:
        folder.note("no step beat the starting drafter on validation: it is kept as it was")
    summary = {
        **judge(config),
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "best_step": outcome.best_step,
        "tokens_per_second": mean_pace(read_metrics(folder.path / FILE_NAME)),
        "peak_memory_bytes": peak_memory_bytes(),
        **stored_error(read_metrics(folder.path / FILE_NAME)),
        **({"alpha_by_rate": {f"{rate:.2e}": a for rate, a in rates.items()}} if rates else {}),
        "divergence": config.divergence.name,
        "source": config.source.name,
    }
    folder.tracker.artifact(f"{config.name}-draft", "model", folder.path / DRAFT, summary)
    return summary


def stored_error(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The most by which stored scores may have understated the last validation alpha, if any."""
    found = [line["alpha_error_bound"] for line in lines if "alpha_error_bound" in line]
    return {"alpha_error_bound": found[-1]} if found else {}


def mean_pace(lines: list[dict[str, Any]]) -> float:
    """Generated tokens trained on per second, sampling included, over all logged steps."""
    steps = [line for line in lines if line["section"] == "train"]
    tokens = [
        b["total_tokens"] - a["total_tokens"] for a, b in pairwise([{"total_tokens": 0}, *steps])
    ]
    seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, steps, strict=True)]
    return sum(tokens) / sum(seconds)


if __name__ == "__main__":
    distill.main()
