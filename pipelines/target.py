"""`python -m pipelines.target`: a small Llama-type target, where none is given.

It is trained from scratch on the text of `data`. Shared by every experiment with the same data and
target, whatever its drafter; a kill at any moment costs the steps since the last checkpoint.
"""

from typing import Any

from draftkit.config import Config, ModelConfig
from draftkit.models.loading import with_path
from draftkit.workflow.pretraining import pretrain
from pipelines.checksums import data_sha256, model_sha256
from pipelines.stage import StageFolder, stage
from pipelines.texts import splits_of, tokenizer_of


@stage(
    sections=("seed", "data", "target.pretrain"),
    shared=True,
    inputs=lambda config: {"data": data_sha256(config.data)},
)
def target(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Train the target, in `target` of the folder."""
    splits = splits_of(config)
    if not (folder.path / "target").exists():
        pretrain(
            "target",
            config,
            tokenizer=tokenizer_of(config),
            texts=splits.train,
            folder=folder.path,
            tracker=folder.tracker,
            note=folder.note,
        )
    return {"text_sha256": splits.sha256}


def target_of(config: Config) -> ModelConfig:
    """The target, from where it lies or trained first."""
    if config.target.path is not None:
        return config.target
    return with_path(config.target, target.ensure(config) / "target")


def target_hashes(config: Config) -> dict[str, str]:
    """Checksums of what the target's own text depends on."""
    return {
        "target": model_sha256(target_of(config), "target"),
        "data": data_sha256(config.data),
    }


if __name__ == "__main__":
    target.main()
