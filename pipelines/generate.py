"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

They carry the target's most likely ids of every token where `generate.top_k` wants some: it had
them in its hands. Shared by the experiments with the same target, text and sampling, and written in
parts: a kill costs one part.
"""

from typing import Any

from draftkit.config import Config
from draftkit.data.rollouts import Record, write_parts
from draftkit.data.splits import read_splits
from draftkit.distillation.progress import Countdown
from draftkit.distillation.samplers import (
    ROLLOUTS,
    OpenAISampler,
    Sampler,
    answered,
    noise_seed,
    target_sampler,
)
from draftkit.models.loading import load_outline, load_target

from .command import main
from .plan import GENERATE, carries_scores
from .stage import StageFolder


def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split.

    Under the served distribution, by our decoder or by an engine that serves the target over HTTP
    (`generate.url`).
    """
    size, total = config.generate.batch_size, config.generate.rollouts
    splits, target = read_splits(folder.inputs["texts"]), folder.model(config, "target")
    rollouts = tokens = 0
    countdown = Countdown(total, folder.note)

    def watch(done: float, new: int) -> None:  # of the lot in hand
        count = tokens + new
        countdown(
            rollouts + done, f"{rollouts + int(done):,} of {total:,} answers, {count:,} tokens"
        )

    sampler: Sampler
    seed, url = noise_seed(config.seed, ROLLOUTS), config.generate.url
    if url is not None:
        assert target.path is not None
        sampler = OpenAISampler(
            url=url,
            model=config.generate.model or target.path,
            sampling=config.sampling,
            eos_token_ids=load_outline(target, config.hardware).eos_token_ids,
            max_new_tokens=splits.room.new,
            max_length=splits.room.total,
            batch_size=size,
            seed=seed,
        )
    else:
        sampler = target_sampler(
            load_target(target, config.hardware),
            config.sampling,
            splits.room,
            seed=seed,
            batch_size=size,
            top_k=config.generate.top_k if carries_scores(config) else 0,
            watch=watch,
        )
    prompts = splits.train

    def answer(rows: range) -> list[Record]:
        lot = [prompts[row % len(prompts)] for row in rows]
        return answered(sampler, lot, rows=rows, version=folder.digests["target"])

    for records in write_parts(folder.path, total, size=size, make=answer):
        rollouts += len(records)
        tokens += sum(len(record.output_ids) for record in records)
        watch(0, 0)
    return {"rollouts": total, "tokens": tokens}


if __name__ == "__main__":
    main(GENERATE)
