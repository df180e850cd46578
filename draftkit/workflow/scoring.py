"""What the target makes of training texts, stored: its most likely ids at every token.

With `generate.top_k` above 0 a draft learns from these, and the target is not in memory while it
does.
"""

from collections.abc import Sequence

from draftkit.config import Config
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.data.store import Mapped
from draftkit.distillation.teacher import stored_scores
from draftkit.models.adapter import CausalAdapter
from draftkit.workflow.sources import TrainingTexts, completed

BATCH = 16  # texts that the target reads at once


def texts_to_score(config: Config, texts: TrainingTexts) -> Sequence[Record]:
    """The target's rollouts (`source=target`), or the data's own texts (`fixed`).

    Raises ValueError for a source whose texts change as the draft learns.
    """
    if config.source.name == "target":
        assert texts.rollouts is not None
        return texts.rollouts
    if config.source.name == "fixed":
        examples = completed(texts.examples)
        return Mapped(lambda row: _record(config, row, examples[row]), range(len(examples)))
    raise ValueError(
        f"generate.top_k: source={config.source.name} makes new texts, which have no scores: "
        "use source=target or fixed, or generate.top_k=0"
    )


def _record(config: Config, row: int, example: Example) -> Record:
    """A text of the data as if it had been sampled."""
    prompt = example.prompt_ids
    return Record(
        prompt_ids=prompt,
        output_ids=example.token_ids[len(prompt) :],
        sampler="data",
        sampler_version="",
        sampling=dict(vars(config.sampling)),
        seed=config.seed,
        row=row,
        document=example.document,
        domain=example.domain,
    )


def scored_by(
    target: CausalAdapter, records: Sequence[Record], *, top_k: int, temperature: float
) -> list[Record]:
    """`records` with the target's `top_k` most likely ids, for a loss at `temperature`."""
    scored: list[Record] = []
    for first in range(0, len(records), BATCH):
        lot = records[first : first + BATCH]
        scored += stored_scores(target, lot, k=top_k, loss_temperature=temperature)
    return scored
