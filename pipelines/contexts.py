"""Evaluation contexts: held-out prompts that the target has continued, once, for every draft.

Sampled under the served distribution and shared by all experiments with the same target, text and
sampling, so that drafts are compared on the same positions. Validation contexts choose the
weights in `distill`; test contexts are for the tables alone.
"""

from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import Record, read_records, write_records
from draftkit.models.loading import load_target
from draftkit.workflow.sampling import target_sampler
from pipelines.inputs import prompts_of, text_and_target
from pipelines.plan import StageFolder
from pipelines.run import stage


@stage(
    sections=(
        "seed",
        "data",
        "sampling",
        "evaluate.prompts",
        "evaluate.validation_prompts",
        "evaluate.max_new_tokens",
    ),
    shared=True,
    needs=text_and_target,
)
def contexts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Continue the held-out prompts of both splits."""
    options, splits = config.evaluate, read_splits(folder.input("texts"))
    sampler = target_sampler(
        load_target(folder.model(config, "target"), config.hardware),
        sampling=config.sampling,
        seed=config.seed,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
    )
    summary = {}
    for name, examples, count in (
        ("validation", splits.validation, options.validation_prompts),
        ("test", splits.test, options.prompts),
    ):
        prompts = prompts_of(examples, count)
        records = sampler.sample(
            prompts, rows=range(len(prompts)), version=folder.checksums["target"]
        )
        write_records(folder.path / f"{name}.parquet", records)
        summary[name] = {
            "prompts": len(records),
            "tokens": sum(len(record.output_ids) for record in records),
        }
    return summary


def read_contexts(folder: Path, split: str) -> list[Record]:
    """The contexts of `split` (`validation` or `test`) in a complete folder."""
    return read_records(folder / f"{split}.parquet")
