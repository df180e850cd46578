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
    answered,
    noise_seed,
    target_sampler,
)

from .command import main
from .contexts import writer_of
from .plan import GENERATE, carries_scores
from .stage import StageFolder

BATCHES = 4  # of a part: an answer that has ended makes room for the next one


def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split.

    Under the served distribution, by our decoder or by engines that serve the target
    (`target.urls`).
    """
    size, total = config.generate.batch_size, config.generate.rollouts
    splits = read_splits(folder.inputs["texts"])
    rollouts = tokens = 0
    countdown = Countdown(total, folder.note)

    def watch(done: float, new: int) -> None:  # of the lot in hand
        count = tokens + new
        countdown(
            rollouts + done, f"{rollouts + int(done):,} of {total:,} answers, {count:,} tokens"
        )

    sampler = target_sampler(
        writer_of(config, folder),
        config.sampling,
        splits.room,
        seed=noise_seed(config.seed, ROLLOUTS),
        batch_size=size,
        compiled=config.compiles_texts,
        top_k=config.generate.top_k if carries_scores(config) else 0,
        watch=watch,
    )
    prompts = splits.train

    def answer(rows: range) -> list[Record]:
        lot = [prompts[row % len(prompts)] for row in rows]
        return answered(sampler, lot, rows=rows, version=folder.digests["target"])

    part = size if config.limit else BATCHES * size  # a dry run tells the pace by its parts
    for records in write_parts(folder.path, total, size=part, make=answer):
        rollouts += len(records)
        tokens += sum(len(record.output_ids) for record in records)
        watch(0, 0)
    return {"rollouts": total, "tokens": tokens}


if __name__ == "__main__":
    main(GENERATE)
