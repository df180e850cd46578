"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

Sampled under the served distribution, by our decoder or by an engine that serves the target over
HTTP (`generate.engine=openai`). Written in parts, so that a kill costs one part.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record, RecordParts, read_records, write_records
from draftkit.distillation.engines import RETOKENISED, OpenAISampler
from draftkit.distillation.samplers import AnswerSettings, DecoderSampler, Sampler
from draftkit.models.loading import Target, load_outline, load_target
from pipelines.stage import StageFolder, stage
from pipelines.target import target_hashes, target_of
from pipelines.texts import splits_of

# Where an engine answers, and to how many at a time, is no part of what it answers.
ROLLOUT_SETTINGS = tuple(f"generate.{key}" for key in ("rollouts", "batch_size", "engine", "model"))


def target_sampler(
    config: Config,
    target: Target | None = None,
    *,
    max_new_tokens: int,
    batch_size: int,
    max_length: int | None = None,
) -> DecoderSampler:
    """The target, which is loaded unless it is given, sampled as it is served."""
    target = target or load_target(target_of(config), config.hardware)
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
    target, options = target_of(config), config.generate
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


def sampled(
    sampler: Sampler,
    examples: Sequence[Example],
    total: int,
    *,
    size: int,
    version: str,
    path_of: Callable[[int], Path],
) -> Iterator[list[Record]]:
    """Answers to `total` prompts of `examples`, `size` at a time, each lot in a file of its own.

    Row i is example i, and they come again when all have been asked. `path_of(i)` is the file of
    the lot that begins with row i; one that is there is not sampled again.
    """
    for first in range(0, total, size):
        path = path_of(first)
        if not path.exists():
            rows = range(first, min(first + size, total))
            prompts = [examples[row % len(examples)].prompt_ids for row in rows]
            write_records(path, sampler.sample(prompts, rows=rows, version=version))
        yield read_records(path)


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
    rollouts = tokens = retokenised = 0
    for records in sampled(
        sampler,
        splits_of(config).train,
        total,
        size=size,
        version=target_hashes(config)["target"],
        path_of=lambda first: folder.path / f"part-{first:08d}.parquet",
    ):
        rollouts += len(records)
        tokens += sum(len(record.output_ids) for record in records)
        retokenised += sum(record.sampler == RETOKENISED for record in records)
        folder.note(f"{rollouts}/{total} rollouts, {tokens:,} tokens")
    if retokenised:
        folder.note(f"{retokenised} answers came as text: their tokens may not be those sampled")
    return {"rollouts": total, "tokens": tokens, "retokenised": retokenised}


if __name__ == "__main__":
    generate.main()
