"""`python -m pipelines.target`: a small Llama-type target, where none is given.

It is trained from scratch on the text of `data`. Shared by every experiment with the same data and
target, whatever its drafter; a kill at any moment costs the steps since the last checkpoint.
"""

from typing import Any

from draftkit.artifacts import provenance, write_text
from draftkit.config import Config, TargetConfig
from draftkit.data.prompts import read_splits
from draftkit.distillation.pretrain import full_rows, new_model, pretrain, recipe
from draftkit.distillation.progress import reporting, training_seconds
from draftkit.evaluation.cards import target_card
from draftkit.evaluation.compression import score_texts
from draftkit.models.files import CARD
from draftkit.models.loading import load_target
from draftkit.tracking import FILE_NAME, read_metrics

from .command import main
from .plan import TARGET
from .stage import StageFolder
from .texts import tokenizer_of

SCORED = 512  # windows of the test split


def target(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Train the target, in `target` of the folder."""
    splits = read_splits(folder.input("texts"))
    tokenizer = tokenizer_of(config, folder.input("texts"))
    if not (folder.path / "target").exists():
        shape = config.target.pretrain
        pretrain(
            new_model(config, shape, tokenizer),
            full_rows(splits.train, splits.room.total),
            folder.path / "target",
            tokenizer=tokenizer,
            shape=shape,
            config=config,
            log=reporting("prepare_target", shape.max_steps, folder.tracker, folder.note),
            optimizer=shape.optimizer,
            saved_as=shape.dtype,
        )
    trained = load_target(TargetConfig(path=str(folder.path / "target")), config.hardware)
    scores = score_texts(trained.adapter, tokenizer, splits.test[:SCORED], batch_size=16)
    for domain, score in scores.items():
        folder.note(
            f"{domain}, held out: {score.bits_per_byte:.2f} bits a byte, "
            f"most likely token {score.argmax_probability:.2f}"
        )
    lines = read_metrics(folder.path / FILE_NAME)
    training = [line for line in lines if line["section"] == "prepare_target"]
    summary: dict[str, Any] = {
        "text_sha256": splits.sha256,
        "steps": training[-1]["step"],
        "tokens": training[-1]["total_tokens"],
        "hours": training_seconds(training) / 3600,
        "bits_per_byte": {domain: score.bits_per_byte for domain, score in scores.items()},
        "argmax_probability": {domain: s.argmax_probability for domain, s in scores.items()},
    }
    how = recipe(config.target.pretrain)
    card = target_card(config, summary, recipe=how, origin=provenance())
    write_text(folder.path / "target" / CARD, card)
    return summary


if __name__ == "__main__":
    main(TARGET)
