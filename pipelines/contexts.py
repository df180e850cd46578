"""`python -m pipelines.contexts`: held-out prompts that the target has continued, once.

Every drafter is judged on the same continuations: they are shared by the experiments with the same
target, text and sampling. Those of the validation split choose the weights in `train`, those of the
test split are for the tables alone.
"""

from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from draftkit.data.lengths import Room
from draftkit.data.rollouts import Record, document_of, read_records, write_records
from draftkit.data.splits import read_splits
from draftkit.distillation.assembly import load_teaching_target
from draftkit.distillation.losses import NEEDS_FULL_SUPPORT
from draftkit.distillation.progress import Countdown
from draftkit.distillation.remote import PROBE_FILE, RemoteTarget, remote_target
from draftkit.distillation.samplers import TEST, VALIDATION, target_answers
from draftkit.evaluation.intervals import LEAST_UNITS
from draftkit.models.files import ModelFolder
from draftkit.models.heads import head_class
from draftkit.models.loading import Outline, Target, load_target

from .command import main
from .plan import CONTEXTS, answer_tokens
from .stage import StageFolder


def writer_of(config: Config, folder: StageFolder) -> Target | RemoteTarget:
    """The target that answers prompts: in memory, or the engines of `target.urls`."""
    target = folder.model(config, "target")
    if not target.urls:
        return load_target(target, config.hardware)
    scored = config.teacher_top_k if config.scored_by_engine else 0
    engines = remote_target(target, config.hardware, top_k=scored)
    if engines.probe is not None:  # by which whoever reads the answers knows the model again
        write_json(folder.path / PROBE_FILE, [one.tolist() for one in engines.probe])
    return engines


def check_teacher(config: Config, *, learns: bool) -> None:
    """Raise ValueError for what the engines of `target.urls` cannot score; learns: or teach."""
    if not config.scored_by_engine:
        return
    why, path = "", config.draft.path
    if path is not None and head_class(ModelFolder(config.draft).config) is not None:
        why = "shows no hidden states, which a head reads: give draft.kind too (eagle3, medusa)"
    elif config.sampling.repetition_penalty != 1:
        why = "scores texts without a repetition penalty: use sampling.repetition_penalty=1"
    elif config.sampling.temperature > 0 and (
        config.decode.proposer == "argmax" or config.decode.verification == "match"
    ):
        why = (
            "names the likeliest ids alone, which does not tell how often argmax proposals, or "
            "matched ones, are accepted: use decode.proposer=sampled and verification=speculative"
        )
    elif learns and config.source.name == "replay":
        why = "verifies no proposals: use another source than replay"
    elif learns and NEEDS_FULL_SUPPORT & config.divergence.names:
        why = (
            "names the ids that the target likes, and reverse KL needs those that the drafter "
            "likes: use forward_kl, jsd or tvd"
        )
    if why:
        raise ValueError(f"target.urls: an engine {why}")


def teacher_of(config: Config, folder: StageFolder) -> RemoteTarget:
    """The engines of `target.urls` as what scores texts.

    Raises ValueError where another model answers than the one that wrote the held-out answers.
    """
    target = remote_target(
        folder.model(config, "target"),
        config.hardware,
        top_k=config.teacher_top_k,
        at_once=config.generate.batch_size,
    )
    for name, path in folder.inputs.items():
        if (path / PROBE_FILE).is_file():
            target.check_law(read_json(path / PROBE_FILE), name.split()[0])
    return target


def teaching_target(config: Config, folder: StageFolder, *, stored: bool) -> Outline:
    """Who scores for a loss: engines or the target; where scores are `stored`, its outline."""
    if config.scored_by_engine and not stored:
        return teacher_of(config, folder)
    framed = stored and config.generate.hidden_states
    target = folder.model(config, "target")
    return load_teaching_target(target, config.hardware, stored=stored, framed=framed)


def contexts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue held-out prompts of both splits, once, for every draft.

    Validation contexts choose the weights in `train`; test contexts are for the tables alone.
    """
    options, splits = config.evaluate, read_splits(folder.inputs["texts"])
    if (new := answer_tokens(config)) < options.max_new_tokens:
        folder.note(f"{new} tokens an answer, all that the models' context leaves after a prompt")
    needed = LEAST_UNITS * options.timing_batch_size
    held_out = splits.test[: min(needed, options.prompts, options.timing_prompts)]
    timed = len({example.document for example in held_out})  # all that there are, if too few
    if timed < needed:  # said before hours go into the rest
        folder.note(
            f"{timed} held-out documents will be timed, a verdict needs {needed}: it will be "
            "inconclusive (evaluate.timing_prompts, evaluate.prompts, data.test_fraction)"
        )
    target = writer_of(config, folder)
    if isinstance(target, RemoteTarget):
        room = Room(new, target.longest)
    else:
        room = Room(new, target.adapter.max_positions)
    summary, before = {}, 0
    parts = (
        (VALIDATION, splits.validation[: options.validation_prompts]),
        (TEST, splits.test[: options.prompts]),
    )
    total = sum(len(prompts) for _, prompts in parts)
    countdown = Countdown(total, folder.note)

    def watch(done: float, tokens: int) -> None:
        countdown(before + done, f"{before + int(done)} of {total} answers to held-out prompts")

    for name, prompts in parts:
        records = target_answers(
            target, prompts, config, name, room, version=folder.digests["target"], watch=watch
        )
        write_records(folder.path / f"{name}.parquet", records)
        before += len(records)
        tokens = sum(len(record.output_ids) for record in records)
        documents = len({document_of(record) for record in records})
        summary[name] = {"prompts": len(records), "documents": documents, "tokens": tokens}
    return summary


def read_contexts(folder: Path, split: str) -> list[Record]:
    """The contexts of `split` in a complete folder of `contexts`, or of `scores` (validation)."""
    return read_records(folder / f"{split}.parquet")


if __name__ == "__main__":
    main(CONTEXTS)
