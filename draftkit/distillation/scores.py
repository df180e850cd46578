"""The target's most likely ids at every token, stored with texts, to learn without the target.

What carries them (`generate.top_k`) are the target's rollouts, or the data's own texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftkit.config import Config
from draftkit.data.rollouts import Record
from draftkit.data.store import Lazy
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.chunked import chunks
from draftkit.distillation.remote import RemoteTarget
from draftkit.distillation.samplers import check_top_k
from draftkit.distillation.sources import TrainingTexts, completed
from draftkit.models.adapter import Adapter
from draftkit.theory.truncation import most_likely

SCORED_AT_ONCE = 8  # texts that the target reads for its scores


def texts_to_score(config: Config, texts: TrainingTexts) -> Sequence[Record]:
    """What carries the target's scores (`generate.top_k`): its rollouts, or the data's texts."""
    if config.source.name == "target":
        assert texts.rollouts is not None
        return texts.rollouts
    examples = completed(texts.examples)

    def record(row: int) -> Record:  # a text of the data as if it had been sampled
        prompt = examples[row].prompt_ids
        return Record(
            prompt_ids=prompt,
            output_ids=examples[row].token_ids[len(prompt) :],
            sampler="data",
            sampler_version="",
            sampling=dict(vars(config.sampling)),
            seed=config.seed,
            row=row,
            document=examples[row].document,
            domain=examples[row].domain,
        )

    return Lazy(record, range(len(examples)))


def scored_by(
    target: Adapter | RemoteTarget,
    records: Sequence[Record],
    *,
    top_k: int,
    temperature: float,
    layers: tuple[int, ...] = (),
    watch: Callable[[int], None] = lambda done: None,
) -> list[Record]:
    """`records` with the target's `top_k` most likely ids, for a loss at `temperature`.

    Those that carry them need no pass of the target, except for its hidden states of `layers`.
    `watch` hears how many are done. An engine names as many ids as it is opened for. A pass of the
    target is as wide as its longest text, so texts of like lengths share one.
    """
    records, scored = [*records], dict[int, Record]()
    remote = isinstance(target, RemoteTarget)
    size = max(SCORED_AT_ONCE, target.at_once) if remote else SCORED_AT_ONCE
    rows = [*range(len(records))]
    rows.sort(key=lambda row: len(records[row].prompt_ids) + len(records[row].output_ids))
    for first in range(0, len(rows), size):
        own = rows[first : first + size]
        lot = [records[row] for row in own]
        if isinstance(target, RemoteTarget):
            made = target.scored(lot, loss_temperature=temperature)
        else:
            known = None if layers else sampled_scores(lot, loss_temperature=temperature)
            made = known or stored_scores(
                target, lot, k=top_k, loss_temperature=temperature, layers=layers
            )
        scored.update(zip(own, made, strict=True))
        watch(len(scored))
    return [scored[row] for row in range(len(records))]


def sampled_scores(records: Sequence[Record], *, loss_temperature: float) -> list[Record] | None:
    """What `stored_scores` makes of `records` that carry the ids named while they were sampled.

    None where a pass is needed: they do not, or the tail was taken at another temperature. At 1 it
    is what the stored log-probabilities leave.
    """
    scored = []
    for record in records:
        served = record.sampling["temperature"] or 1.0
        if record.topk_log_probs is None or loss_temperature not in (served, 1.0):
            return None
        tail = record.tail_mass
        if loss_temperature != served:
            kept = torch.tensor(record.topk_log_probs, dtype=torch.float64).exp().sum(-1)
            tail = (1 - kept).clamp(min=0).tolist()
        scored.append(replace(record, loss_tail_mass=tail))
    return scored


@torch.no_grad()
def stored_scores(
    target: Adapter,
    records: Sequence[Record],
    *,
    k: int,
    loss_temperature: float,
    layers: tuple[int, ...] = (),
) -> list[Record]:
    """`records` with the target's k most likely ids at every output token, and the mass of others;
    and with its hidden states of `layers` at every token.

    One pass over all records together: give as many as fit. Raises ValueError for k that is no
    less than the vocabulary.
    """
    check_top_k(k, target.vocab_size)
    texts = [continued(record.prompt_ids, record.output_ids) for record in records]
    batch = collate(texts, device=target.device)
    (states, features), head = target.read(batch.input_ids, batch.predicting, layers), target.head
    parts = []
    for rows in chunks(len(states), target.vocab_size, states.device):
        logits = states[rows] if head is None else head(states[rows])
        served = records[0].sampling["temperature"] or 1.0
        ids, log_probs, tails = most_likely(logits, k, [served, loss_temperature])
        parts.append((ids, log_probs, *tails))
    lengths = [len(record.output_ids) for record in records]
    names = ("topk_ids", "topk_log_probs", "tail_mass", "loss_tail_mass")
    columns = [torch.cat(column).cpu().split(lengths) for column in zip(*parts, strict=True)]
    scored = []
    for row, (record, *values) in enumerate(zip(records, *columns, strict=True)):
        known: dict[str, Any] = {"features": None}
        known |= {name: one.tolist() for name, one in zip(names, values, strict=True)}
        if features is not None:
            own = features[row, : len(texts[row].token_ids)]
            known["features"] = own.to("cpu", torch.bfloat16, copy=True)
        scored.append(replace(record, **known))
    return scored
