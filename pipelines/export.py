"""`python -m pipelines.export`: the drafter as vLLM, SGLang, llama.cpp and others load it.

Writes the trained drafter (`evaluate.draft=given`: `draft.path` itself) as a plain folder `hf`, and
for each of `export.engines` how it is started: exact options, the best gamma, the acceptance to
expect where the drafter has been evaluated, and the commands of the converter where one is needed.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, sha256_file, write_text
from draftkit.config import Config, ModelConfig
from draftkit.engines.folder import write_plain_folder
from draftkit.engines.hub import upload
from draftkit.engines.launch import LAUNCHES, Pair, best_gammas, expected, launched_gamma
from draftkit.evaluation.cards import model_card, plain_card
from draftkit.models.files import CARD
from draftkit.models.loading import check_kind, model_config, with_path
from draftkit.models.parallel import parallel_of

from .evaluate import evaluate
from .folder import is_record
from .plan import MANIFEST, SUMMARY, Given, StageFolder, Step
from .prepare import check_pair, models
from .run import stage
from .train import train

PLAIN, JUDGED = "hf", "evaluation"


def needs(config: Config) -> dict[str, Given | Step]:
    """The pair, its training, its evaluation where there is one, all where sizes are named."""
    inputs, judged = models(config), evaluate.step(config)
    if config.evaluate.draft == "trained":
        inputs["trained"] = train.step(config)
    if config.export.batch_sizes or (judged.folder / SUMMARY).is_file():
        inputs[JUDGED] = judged
    for size in config.export.batch_sizes:
        if size != config.evaluate.timing_batch_size:
            inputs[f"{JUDGED} at batch size {size}"] = at_batch(config, size)
    return inputs


def at_batch(config: Config, size: int) -> Step:
    """The evaluation of the same drafter at another batch size, in a folder of its own."""
    options = replace(config.evaluate, timing_batch_size=size)
    job = f"evaluate.timing_batch_size={size}"
    step = evaluate.step(replace(config, evaluate=options, job=job))
    if "trained" in step.needs:  # of this experiment: another job would train its own
        step.needs["trained"] = train.step(config)
    return step


def judgements(folder: StageFolder) -> list[dict[str, Any]]:
    """The summaries of the evaluations, the experiment's own first."""
    names = sorted(name for name in folder.needs if name.startswith(JUDGED))
    return [read_json(folder.input(name) / SUMMARY) for name in names]


def drafter_of(config: Config, folder: StageFolder) -> ModelConfig:
    """The drafter to export."""
    start = folder.model(config, "draft")
    return with_path(start, folder.input("trained")) if "trained" in folder.needs else start


def listed(path: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file of the product, by its name in the folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = {file.relative_to(path).as_posix(): file for file in files}
    return {
        name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for name, file in names.items()
        if not is_record(name.split("/")[0])
    }


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
    """Write the folders; the summary names each file."""
    target, judged = folder.model(config, "target"), judgements(folder)
    drafter = drafter_of(config, folder)
    check_kind(config.draft, model_config(drafter, "draft"))
    parallel = parallel_of(model_config(drafter, "draft")) is not None
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
        card = model_card(judged[0], origin["hardware"], target=name, name=config.name)
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
        "gamma_by_batch_size": {str(size): best for size, best in best_gammas(pair, PLAIN).items()},
        "notes": notes,
        "commit": commit,
        "engines": {
            engine: {"gamma": launched_gamma(pair, engine), "expected": expected(pair, engine)}
            for engine in engines
        },
        "files": listed(folder.path),
    }


if __name__ == "__main__":
    export.main()
