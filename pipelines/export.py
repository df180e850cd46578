"""`python -m pipelines.export`: the drafter as vLLM, SGLang, llama.cpp and others load it.

Writes the trained drafter (`evaluate.draft=given`: `draft.path` itself) as a plain folder `hf`, and
for each of `export.engines` how it is started: exact options, the best gamma, the acceptance to
expect where the drafter has been evaluated, and the commands of the converter where one is needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, write_text
from draftkit.config import Config, DraftConfig
from draftkit.engines.folder import write_plain_folder
from draftkit.engines.hub import upload
from draftkit.engines.launch import LAUNCHES, Pair, expected, launched_gamma
from draftkit.evaluation.cards import model_card, plain_card
from draftkit.models.files import CARD
from draftkit.models.loading import check_kind, model_config, with_path
from draftkit.models.parallel import parallel_of

from .evaluate import evaluate
from .plan import MANIFEST, SUMMARY, Given, StageFolder, Step
from .prepare import check_pair, models
from .run import stage
from .train import train

PLAIN, JUDGED = "hf", "evaluation"


def needs(config: Config) -> dict[str, Given | Step]:
    """The pair, its training, and its evaluation where there is one."""
    inputs, judged = models(config), evaluate.step(config)
    if config.evaluate.draft == "trained":
        inputs["trained"] = train.step(config)
    if (judged.folder / SUMMARY).is_file():
        inputs[JUDGED] = judged
    return inputs


def drafter_of(config: Config, folder: StageFolder) -> DraftConfig:
    """The drafter to export."""
    start = folder.model(config, "draft")
    return with_path(start, folder.input("trained")) if "trained" in folder.needs else start


def show(config: Config, folder: Path) -> None:
    """Print where the product is, how it is started, and what to expect."""
    summary = read_json(folder / SUMMARY)
    for note in summary["notes"]:
        print(f"note: {note}")
    if summary["commit"]:
        print(f"uploaded: {summary['commit']}")
    for engine, part in summary["engines"].items():
        print(f"{engine:<9} {folder / engine}{_hint(part['expected'])}")


def _hint(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return ""
    tokens, gamma = numbers["acceptance_length"]["mean"], numbers["gamma"]
    return f": {tokens:.2f} tokens a pass at gamma {gamma}, computed"


@stage(
    sections=("export", "sampling", "decode.gamma"),
    needs=needs,
    check=check_pair,
    after=show,
)
def export(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Write the folders; the summary says how each engine is started and what to expect."""
    target = folder.model(config, "target")
    judged = read_json(folder.input(JUDGED) / SUMMARY) if JUDGED in folder.needs else None
    drafter = drafter_of(config, folder)
    check_kind(config.draft, model_config(drafter))
    parallel = parallel_of(model_config(drafter)) is not None
    local = Path(target.location).is_dir()
    pair = Pair(
        target=str(Path(target.location).absolute()) if local else target.location,
        revision=target.revision,
        gamma=max(1, config.proposals),
        judged=judged,
        parallel=parallel,
        sampling=config.sampling,
    )
    gamma = launched_gamma(pair, PLAIN)
    notes = write_plain_folder(
        drafter,
        target,
        folder.path / PLAIN,
        gamma=gamma,
        dtype=config.export.dtype,
    )
    name = config.target.location if config.target.path else None
    card = plain_card(name, gamma, parallel=parallel)
    if judged:
        origin = read_json(folder.input(JUDGED) / MANIFEST)["provenance"]
        card = model_card(judged, origin["hardware"], target=name, name=config.name)
    write_text(folder.path / PLAIN / CARD, card)
    engines = [PLAIN, *(one for one in config.export.engines if one != PLAIN)]
    for engine in engines:
        for file, text in LAUNCHES[engine](pair).items():
            write_text(folder.path / engine / file, text)
    commit = None
    if config.export.push_to_hub is not None:
        commit = upload(folder.path / PLAIN, config.export.push_to_hub)
    return {
        "gamma": gamma,
        "notes": notes,
        "commit": commit,
        "engines": {
            engine: {"gamma": launched_gamma(pair, engine), "expected": expected(pair, engine)}
            for engine in engines
        },
    }


if __name__ == "__main__":
    export.main()
