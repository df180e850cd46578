"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

Sampled under the served distribution, by our decoder or by an engine that serves the target over
HTTP (`generate.engine=openai`). Written in parts, so that a kill costs one part.
"""

from typing import Any

from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import Record, write_parts
from draftkit.distillation.engines import RETOKENISED
from draftkit.distillation.samplers import Sampler
from draftkit.models.loading import load_target
from draftkit.workflow.sampling import engine_sampler, target_sampler
from pipelines.inputs import text_and_target
from pipelines.plan import StageFolder
from pipelines.run import stage

# Where an engine answers, and to how many at a time, is no part of what it answers.
ROLLOUT_SETTINGS = tuple(f"generate.{key}" for key in ("rollouts", "batch_size", "engine", "model"))


@stage(
    sections=("seed", "data", "sampling", *ROLLOUT_SETTINGS),
    shared=True,
    needs=text_and_target,
)
def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split."""
    size, total, length = (
        config.generate.batch_size,
        config.generate.rollouts,
        config.data.max_length,
    )
    target = folder.model(config, "target")
    sampler: Sampler
    if config.generate.engine == "openai":
        sampler = engine_sampler(target, config)
    else:
        sampler = target_sampler(
            load_target(target, config.hardware),
            sampling=config.sampling,
            seed=config.seed,
            max_new_tokens=length,
            batch_size=size,
            max_length=length,
        )
    rollouts = tokens = retokenised = 0
    prompts = read_splits(folder.input("texts")).train

    def answer(rows: range) -> list[Record]:
        lot = [prompts[row % len(prompts)].prompt_ids for row in rows]
        return sampler.sample(lot, rows=rows, version=folder.checksums["target"])

    for records in write_parts(folder.path, total, size=size, make=answer):
        rollouts += len(records)
        tokens += sum(len(record.output_ids) for record in records)
        retokenised += sum(record.sampler == RETOKENISED for record in records)
        folder.note(f"{rollouts}/{total} rollouts, {tokens:,} tokens")
    if retokenised:
        folder.note(f"{retokenised} answers came as text: their tokens may not be those sampled")
    return {"rollouts": total, "tokens": tokens, "retokenised": retokenised}


if __name__ == "__main__":
    generate.main()
