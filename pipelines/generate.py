"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

Sampled under the served distribution, in batches with a cache. Written in parts, so that a kill
costs one part.
"""

from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.rollouts import Record, read_records, write_records
from draftkit.distillation.sources import DecoderSampler, rollouts
from draftkit.models.loading import load_target
from pipelines.inputs import models, splits_of, target_hashes
from pipelines.stage import StageFolder, stage


def target_sampler(
    config: Config, *, max_new_tokens: int, batch_size: int, max_length: int | None = None
) -> DecoderSampler:
    """The target, sampled as it is served."""
    target = load_target(models(config)[0], config.hardware)
    return DecoderSampler(
        target.adapter,
        sampling=config.sampling,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=max_new_tokens,
        max_length=max_length or target.adapter.max_positions,
        batch_size=batch_size,
        seed=config.seed,
    )


def read_rollouts(folder: Path) -> list[Record]:
    """All records of a complete `generate` folder."""
    return [row for part in sorted(folder.glob("part-*.parquet")) for row in read_records(part)]


@stage(
    sections=("seed", "data", "generate", "sampling"),
    shared=True,
    inputs=target_hashes,
)
def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split."""
    size, total, tokens = config.generate.batch_size, config.generate.rollouts, 0
    length = config.data.max_length
    sampler = target_sampler(config, max_new_tokens=length, batch_size=size, max_length=length)
    examples = splits_of(config).train
    version = target_hashes(config)["target"]
    for first in range(0, total, size):
        path = folder.path / f"part-{first:08d}.parquet"
        if not path.exists():
            wanted = range(first, min(first + size, total))
            prompts = [examples[i % len(examples)].prompt_ids for i in wanted]
            records = rollouts(sampler, prompts, first_row=first, name="target", version=version)
            write_records(path, records)
        tokens += sum(len(record.output_ids) for record in read_records(path))
        folder.note(f"{min(first + size, total)}/{total} rollouts, {tokens:,} tokens")
    return {"rollouts": total, "tokens": tokens}


if __name__ == "__main__":
    generate.main()
