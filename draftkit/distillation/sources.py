"""Whose sequences the draft learns on: the data's, the target's, or its own.

A source answers `batch(step)` and is a function of the step alone (and, for draft-sampled text,
of the weights at that step), so a resumed run sees what an uninterrupted one sees. Sampling goes
through an injected `Sampler`; this module knows no model and no folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draftkit.config import SamplingConfig
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.decoding.generation import decode, make_requests
from draftkit.distillation.batch import Batch, TokenSequence, collate
from draftkit.models.adapter import Adapter


class Source(Protocol):
    """Batches by step."""

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`, always the same for the same step and weights."""
        ...


class Sampler(Protocol):
    """Continues prompts; `first_row` numbers the noise streams of the call."""

    def sample(self, prompts: Sequence[Sequence[int]], *, first_row: int) -> list[list[int]]:
        """Return the sampled ids of each prompt, cut after the first end of text."""
        ...


class ShuffledOrder:
    """Endless epochs over `count` items, each in an order of its own, addressed by position."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, first: int, count: int) -> list[int]:
        """Return the items at positions `first` .. `first + count - 1`."""
        return [self._item(position) for position in range(first, first + count)]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self._count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._count, generator=generator).tolist()
            self._epoch = epoch
        return self._order[place]


def sequence_of_example(example: Example) -> TokenSequence:
    """The text of the data, loss on its completion."""
    return TokenSequence(example.token_ids, example.loss_mask)


def whole_text(example: Example) -> TokenSequence:
    """The text of the data, loss on all of it: plain pre-training."""
    return TokenSequence(example.token_ids, [False] + [True] * (len(example.token_ids) - 1))


def continued(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> TokenSequence:
    """A prompt and what a model made of it, loss on the latter."""
    return TokenSequence(
        [*prompt_ids, *output_ids], [False] * len(prompt_ids) + [True] * len(output_ids)
    )


def sequence_of_record(record: Record) -> TokenSequence:
    """A stored rollout, loss on its output."""
    return continued(record.prompt_ids, record.output_ids)


class TextSource:
    """`fixed` and `target`: stored sequences, in shuffled epochs."""

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        version: str = "",
    ) -> None:
        self._sequences = sequences
        self._batch_size = batch_size
        self._device = device
        self._version = version
        self._order = ShuffledOrder(len(sequences), seed)

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`."""
        chosen = self._order.at(step * self._batch_size, self._batch_size)
        rows = [self._sequences[i] for i in chosen]
        return collate(rows, device=self._device, sampler_version=self._version)


class DraftSource:
    """`draft`: sequences sampled, at every step anew, from the draft as it is now.

    Samples are constants for the gradient. `version` of a batch is the step that sampled it.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._prompts = prompts
        self._sampler = sampler
        self._batch_size = batch_size
        self._device = device
        self._order = ShuffledOrder(len(prompts), seed)

    def batch(self, step: int) -> Batch:
        """Sample the batch of `step` with the weights of this moment."""
        first = step * self._batch_size
        prompts = [self._prompts[i] for i in self._order.at(first, self._batch_size)]
        outputs = self._sampler.sample(prompts, first_row=first)
        rows = [continued(p, o) for p, o in zip(prompts, outputs, strict=True)]
        return collate(rows, device=self._device, sampler_version=f"step {step}")


@dataclass(frozen=True)
class DecoderSampler:
    """`Sampler` over our own decoder: plain sampling of `model` in batches, with a cache.

    An answer ends after `max_new_tokens`, or where prompt and answer hold `max_length` tokens.
    """

    model: Adapter
    sampling: SamplingConfig
    eos_token_ids: Sequence[int]
    max_new_tokens: int
    max_length: int
    batch_size: int
    seed: int

    def sample(self, prompts: Sequence[Sequence[int]], *, first_row: int) -> list[list[int]]:
        """Continue every prompt to its end of text or the limit."""
        requests = list(
            make_requests(
                prompts,
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                seed=self.seed,
                first_row=first_row,
                max_length=min(self.max_length, self.model.max_positions),
            )
        )
        answers = decode(
            self.model, requests, eos_token_ids=self.eos_token_ids, batch_size=self.batch_size
        )
        return [answer.output_ids for answer in answers]


def rollouts(
    sampler: DecoderSampler,
    prompts: Sequence[Sequence[int]],
    *,
    first_row: int,
    name: str,
    version: str,
) -> list[Record]:
    """Sample `prompts` and keep each answer with who made it, how, and from which noise."""
    outputs = sampler.sample(prompts, first_row=first_row)
    return [
        Record(
            prompt_ids=list(prompt),
            output_ids=output,
            sampler=name,
            sampler_version=version,
            sampling=dict(vars(sampler.sampling)),
            seed=sampler.seed,
            row=row,
        )
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), first_row)
    ]
