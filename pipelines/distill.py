"""`python -m pipelines.distill`: train a drafter towards its target, judge it, show what changed.

    texts -> target -> prepare -> generate, contexts, scores -> train -> evaluate -> distill

Each is a step of the plan, in a folder of its own, and is left out where the configuration gives
its product or does not need it. The drafter lies in `outputs/<name>/distill/draft`, beside a card
that states its numbers.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import atomic_path, read_json, write_json, write_text
from draftkit.config import Config
from draftkit.engines.folder import assistant_options
from draftkit.engines.launch import model_card
from draftkit.evaluation.alpha import MODES
from draftkit.evaluation.engines import best_gamma_of
from draftkit.evaluation.page import REPORT, as_html, decision_page, write_page
from draftkit.evaluation.report import bounds_table, result_lines, ways_table
from draftkit.models.files import CARD
from draftkit.models.served import FILE as GENERATION_CONFIG

from .command import main
from .evaluate import SAMPLES, TRACE
from .plan import DISTILL
from .product import MANIFEST, SUMMARY, plan
from .stage import StageFolder
from .train import DRAFT


def show(config: Config, folder: Path) -> None:
    """Print what the pair says, what changed, and where all of it is."""
    judged, colour = plan(DISTILL, config).paths["evaluate"], sys.stdout.isatty()
    summary = read_json(judged / SUMMARY)
    if timed := "ways" in summary:
        print((judged / SAMPLES[colour]).read_text(encoding="utf-8"))
        Console(width=80).print(result_lines(summary), ways_table(summary), sep="\n")
    else:
        Console(width=80).print(bounds_table(summary))
    print(f"The drafter, as save_pretrained writes it: {folder / DRAFT}")
    if timed:
        print(f"For who decides about it, a page: {folder / REPORT}")
    print("All numbers: the same command with `evaluate` in place of `distill`")


def distill(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Lay the judged drafter out for use, with the numbers of training and evaluation."""
    trained, evaluated = folder.inputs["train"].parent, folder.inputs["evaluate"]
    judged, training = read_json(evaluated / SUMMARY), read_json(trained / SUMMARY)
    summary: dict[str, Any] = {"verdict": judged["verdict"]}
    timed = "ways" in judged  # else an engine has scored it
    for mode in MODES if timed else ["alpha"]:
        summary[f"{mode}_before"] = judged["before"][mode]
        summary[f"{mode}_after"] = judged[mode]
        summary[f"{mode}_gain"] = judged[f"{mode}_gain"]
    summary |= training
    with atomic_path(folder.path / DRAFT) as temporary:
        # No links: who edits what lies here must not change what was trained and judged.
        shutil.copytree(trained / DRAFT, temporary)
        target = config.target.location if config.target.path else None
        card = model_card(
            judged if timed else None,
            target=target,
            name=config.name,
            kind=judged["kind"],
            gamma=judged["gamma"],
        )
        write_text(temporary / CARD, card)
        if timed and (generation := temporary / GENERATION_CONFIG).exists():  # a head has none
            proposing = assistant_options(max(best_gamma_of(judged, "hf"), 1))
            write_json(generation, read_json(generation) | proposing)
    if timed:
        origin = read_json(evaluated / MANIFEST)["provenance"]
        page = decision_page(
            judged,
            name=config.name,
            traces=read_json(evaluated / TRACE),
            provenance=origin | {"inputs": folder.digests},
            trained=training,
        )
        write_page(folder.path, page)
        folder.tracker.report(as_html(page | {"traces": ()}))
    folder.tracker.artifact(f"{config.name}-draft", folder.path / DRAFT, summary)
    return summary


if __name__ == "__main__":
    main(DISTILL)
