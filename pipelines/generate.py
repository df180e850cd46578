"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

Sampled under the served distribution, by our decoder or by an engine that serves the target over
HTTP (`generate.engine=openai`). Written in parts, so that a kill costs one part.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.rollouts import Record, RecordParts, read_records, write_records
from draftkit.distillation.engines import RETOKENISED, OpenAISampler
from draftkit.distillation.samplers import AnswerSettings, DecoderSampler, Sampler
from draftkit.models.loading import load_outline, load_target
from pipelines.inputs import models, target_hashes
from pipelines.stage import StageFolder, stage
from pipelines.texts import splits_of

# Where an engine answers, and to how many at a time, is no part of what it answers.
ROLLOUT_SETTINGS = tuple(f"generate.{key}" for key in ("rollouts", "batch_size", "engine", "model"))


def target_sampler(
    config: Config, *, max_new_tokens: int, batch_size: int, max_length: int | None = None
) -> DecoderSampler:
    """The target, sampled as it is served."""
    target = load_target(models(config)[0], config.hardware)
    settings = AnswerSettings(
        sampling=config.sampling,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=max_new_tokens,
        max_length=max_length or target.adapter.max_positions,
        batch_size=batch_size,
        seed=config.seed,
    )
    return DecoderSampler(model=target.adapter, name="target", settings=settings)


def engine_sampler(config: Config) -> OpenAISampler:
    """The target, as the engine at `generate.url` serves it; its weights are not loaded here."""
    target, options = models(config)[0], config.generate
    assert options.url is not None
    assert target.path is not None
    outline = load_outline(target, config.hardware)
    tokenizer = outline.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    settings = AnswerSettings(
        sampling=config.sampling,
        eos_token_ids=outline.eos_token_ids,
        max_new_tokens=config.data.max_length,
        max_length=config.data.max_length,
        batch_size=options.concurrency,
        seed=config.seed,
    )
    return OpenAISampler(
        url=options.url,
        model=options.model or target.path,
        concurrency=options.concurrency,
        settings=settings,
        encode=partial(tokenizer.encode, add_special_tokens=False),
        decode=decode,
        key=os.environ.get("OPENAI_API_KEY", ""),
    )


def read_rollouts(folder: Path) -> Sequence[Record]:
    """All records of a complete `generate` folder."""
    return RecordParts(sorted(folder.glob("part-*.parquet")))


@stage(
    sections=("seed", "data", "sampling", *ROLLOUT_SETTINGS),
    shared=True,
    inputs=target_hashes,
)
def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split."""
    size, total, length = (
        config.generate.batch_size,
        config.generate.rollouts,
        config.data.max_length,
    )
    sampler: Sampler
    if config.generate.engine == "openai":
        sampler = engine_sampler(config)
    else:
        sampler = target_sampler(config, max_new_tokens=length, batch_size=size, max_length=length)
    tokens = retokenised = 0
    examples = splits_of(config).train
    version = target_hashes(config)["target"]
    for first in range(0, total, size):
        path = folder.path / f"part-{first:08d}.parquet"
        if not path.exists():
            wanted = range(first, min(first + size, total))
            prompts = [examples[i % len(examples)].prompt_ids for i in wanted]
            write_records(path, sampler.sample(prompts, rows=wanted, version=version))
        records = read_records(path)
        tokens += sum(len(record.output_ids) for record in records)
        retokenised += sum(record.sampler == RETOKENISED for record in records)
        folder.note(f"{min(first + size, total)}/{total} rollouts, {tokens:,} tokens")
    if retokenised:
        folder.note(f"{retokenised} answers came as text: their tokens may not be those sampled")
    return {"rollouts": total, "tokens": tokens, "retokenised": retokenised}


if __name__ == "__main__":
    generate.main()
