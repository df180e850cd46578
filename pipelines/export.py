"""`python -m pipelines.export`: the drafter as vLLM, SGLang, llama.cpp and others load it.

Writes the trained drafter (`evaluate.draft=given`: `draft.path` itself) as a plain folder `hf`, and
beside it `launch.md`: how each engine is started, with exact options, the best gamma, the
acceptance to expect where the drafter has been evaluated, and the converter's commands where one is
needed.
"""

from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, write_text
from draftkit.config import Config
from draftkit.engines.folder import upload, write_folder
from draftkit.engines.launch import expected, launch_text, launched_gammas, model_card
from draftkit.models.files import CARD, ModelFolder
from draftkit.models.head_files import kind_of
from draftkit.models.heads import MEDUSA
from draftkit.models.loading import check_kind

from .command import main
from .evaluate import drafter_of
from .plan import EXPORT
from .prepare import check_pair
from .product import SUMMARY
from .stage import StageFolder

PLAIN, LAUNCH, JUDGED = "hf", "launch.md", "evaluate"


def check(config: Config) -> None:
    """Raise ValueError for a drafter that no engine loads."""
    check_pair(config)
    draft = config.draft
    if draft.kind == MEDUSA or (draft.path and kind_of(ModelFolder(draft).config) == MEDUSA):
        raise ValueError(
            "draft.kind=medusa: no engine loads Medusa heads any more, so nothing can be exported: "
            "`draftkit serve` serves them, or train draft.kind=eagle3"
        )


def show(config: Config, folder: Path) -> None:
    """Print where the product is, how it is started, and what to expect."""
    summary = read_json(folder / SUMMARY)
    for note in summary["notes"]:
        print(f"note: {note}")
    if summary["commit"]:
        print(f"uploaded: {summary['commit']}")
    print(f"the drafter: {folder / PLAIN}, how to start it: {folder / LAUNCH}")
    for engine, part in summary["engines"].items():
        if part["expected"]:
            tokens, gamma = part["expected"]["acceptance_length"]["mean"], part["expected"]["gamma"]
            print(f"{engine:<9} {tokens:.2f} tokens a pass at gamma {gamma}, computed")


def export(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Write both; the summary says at which gamma each engine is started and what to expect."""
    target = folder.model(config, "target")
    judged = read_json(folder.inputs[JUDGED] / SUMMARY) if JUDGED in folder.inputs else None
    if judged is not None and "engines" not in judged:  # an engine has scored it, and no more
        judged = None
    drafter = drafter_of(config, folder)
    shape = ModelFolder(drafter).config
    check_kind(config.draft, shape)
    kind = kind_of(shape)
    gammas = launched_gammas(judged, max(1, config.proposals), kind=kind)
    gamma, dtype = next(iter(gammas.values())), config.export.dtype
    notes = write_folder(drafter, target, folder.path / PLAIN, gamma=gamma, dtype=dtype)
    name = config.target.location if config.target.path else None
    card = model_card(judged, target=name, name=config.name, kind=kind, gamma=gamma)
    write_text(folder.path / PLAIN / CARD, card)
    local = Path(target.location).is_dir()
    text = launch_text(
        str(Path(target.location).absolute()) if local else target.location,
        revision=target.revision,
        gammas=gammas,
        judged=judged,
        kind=kind,
        sampling=config.sampling,
    )
    write_text(folder.path / LAUNCH, text)
    commit = None
    if config.export.push_to_hub is not None:
        commit = upload(folder.path / PLAIN, config.export.push_to_hub)
    return {
        "gamma": gamma,
        "notes": notes,
        "commit": commit,
        "engines": {
            engine: {"gamma": gamma, "expected": expected(judged, engine)}
            for engine, gamma in gammas.items()
        },
    }


if __name__ == "__main__":
    main(EXPORT)
