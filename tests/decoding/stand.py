"""Rounds of many rows without a decoder around them.

A `Stand` holds what the two units of a round need, as tensors alone: rows may be hundreds of
thousands, any proposer may be tried, and every number of noise may be set. `run` decodes with real
noise; `view_of` shows what a proposer would see.

Shapes: N rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import round as units
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.decoding.round import Outcome, RoundInputs
from draftkit.decoding.state import DecodeState, Group, Request, RoundView, make_group
from draftkit.models.adapter import Adapter
from draftkit.models.cache import SlotCache, visible_slots
from draftkit.theory import noise
from draftkit.theory.verification import VERIFIERS, Verifier
from draftkit.theory.warping import SamplingParams
from tests.decoding.checks import served
from tests.params import params_of, select
from tests.tabular import TabularAdapter
from tests.theory.laws import START, check_sample, pair_laws, sequences

Made = Callable[[TabularAdapter], Proposer]
CHUNK = 20_000  # rows that are decoded at once


def view_of(
    texts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingConfig],
    gamma: int,
    *,
    vocab_size: int = 8,
    capacity: int = 32,
) -> RoundView:
    """What a decoder would show of rows with those texts, under seed 11."""
    state = DecodeState.empty(len(texts), capacity, torch.device("cpu"))
    for slot, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
        request = Request(
            prompt_ids=text,
            max_new_tokens=8,
            sampling=sampling,
            gamma=gamma,
            proposer_id="draft",
            seed=11,
            row=slot,
        )
        state.admit(slot, request)
    group = make_group(state, list(range(len(texts))), gamma, "draft")
    visible = visible_slots(max(map(len, texts)) + gamma, capacity)
    target: Any = SimpleNamespace(vocab_size=vocab_size)
    bench: Any = SimpleNamespace(state=state, target=target, noise=noise.uniform)
    return units.round_view(bench, RoundInputs(group, visible))


class Stand:
    """Rows of texts [N, T] of `length` [N] tokens, on which rounds are played: a `round.Bench`."""

    def __init__(
        self,
        proposer: Proposer,
        target: TabularAdapter,
        texts: Tensor,
        length: Tensor,
        *,
        params: SamplingParams,
        gamma: int,
        limit: int,
        verifier: Verifier = VERIFIERS["speculative"],
        noise_function: Callable[..., Tensor] = noise.uniform,
        eos: tuple[int, ...] = (),
    ) -> None:
        rows, capacity = len(texts), limit + 2 * (gamma + 1)
        self.proposer = proposer
        self.target: Adapter = target
        self.verifier = verifier
        self.mode = "alpha"
        self.noise = noise_function
        self.top_k = 0
        self.eos_token_ids = torch.tensor(eos, dtype=torch.long)
        self.cache = SlotCache(rows, capacity)
        self.state = DecodeState.empty(rows, capacity, torch.device("cpu"))
        self.state.tokens[:, : texts.shape[1]] = texts
        self.state.length, self.state.done = length.clone(), torch.zeros_like(length).bool()
        self.state.limit = torch.full_like(length, limit)
        self.state.row = torch.arange(rows)
        group = Group(
            members={},
            index=torch.arange(rows),
            rows=None,
            active=torch.ones(rows, dtype=torch.bool),
            params=params,
            gamma=gamma,
            proposer_id="draft",
        )
        self.inputs = RoundInputs(group, visible=capacity)
        positions = torch.arange(texts.shape[1]).expand(rows, -1)
        target.prefill(texts, positions=positions, cache=self.cache.select(None, visible=capacity))
        proposer.allocate(rows, capacity)
        every = torch.arange(rows)
        proposer.prefill(texts, positions=positions, rows=every, visible=capacity)

    def propose(self) -> Proposal:
        """The proposals of a round."""
        return units.propose((self.proposer, self), self.inputs)

    def play(self) -> tuple[Proposal, Outcome]:
        """A whole round."""
        proposal = self.propose()
        return proposal, units.verify(self, self.inputs._replace(proposal=proposal))


def run(
    make: Made,
    tables: tuple[Tensor, Tensor],
    *,
    rows: int,
    tokens: int = 6,
    gamma: int = 3,
    sampling: SamplingConfig | None = None,
    verification: str = "speculative",
    noise_function: Callable[..., Tensor] = noise.uniform,
) -> None:
    """With real noise, over several rounds, positions and pairs have the target's law.

    tables: probabilities [V, V, V] of target and draft by the last two tokens.
    """
    sampling = sampling or SamplingConfig()
    target, draft = (TabularAdapter(torch.cat([t, t[:1]]).double().log()) for t in tables)
    sample = []
    for row in torch.arange(rows).split(CHUNK):
        stand = Stand(
            make(draft),
            target,
            torch.tensor(START).expand(len(row), -1),
            torch.full_like(row, len(START)),
            params=select(params_of([vars(sampling)]), torch.zeros_like(row)),
            gamma=gamma,
            limit=len(START) + tokens,
            verifier=VERIFIERS[verification],
            noise_function=noise_function,
        )
        stand.state.row = row
        while not stand.state.done.all():
            stand.play()
        sample.append(stand.state.tokens[:, len(START) : len(START) + tokens])
    size = target.vocab_size
    law = served(target, sequences(size, 2), sampling).view(size, size, size)
    check_sample(torch.cat(sample), pair_laws(law, tokens))
