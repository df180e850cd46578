"""Who proposes: tokens, and the distribution that they were drawn from.

A proposer sees committed text only (`RoundView`) and returns what it drew together with the q it
drew from, so that verification is exact whatever the proposer is, and stays exact when weights
are swapped between rounds.

Shapes: B rows, K proposed tokens, V vocabulary.
"""

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftkit.decoding.cache import SlotCache
from draftkit.decoding.state import RoundView
from draftkit.models.adapter import Adapter
from draftkit.theory.noise import DRAFT, sample
from draftkit.theory.warping import warp


class Proposal(NamedTuple):
    """Tokens and the q of each; `draft_probs` None means one-hot proposals."""

    tokens: Tensor  # [B, K] int64
    draft_probs: Tensor | None  # [B, K, V]
    lengths: Tensor  # [B] valid proposals, at most K


class Proposer(Protocol):
    """Anything that can guess the next tokens of rows of text."""

    version: str
    max_positions: int
    has_cache: bool  # whether it must be shown all text, by `prefill` or by taking part

    @property
    def signature(self) -> Hashable:
        """Proposers of one signature differ in tensor contents only, so they share code."""
        ...

    def allocate(self, slots: int, capacity: int) -> None:
        """Make room for `slots` rows of `capacity` tokens."""
        ...

    def prefill(self, tokens: Tensor, *, positions: Tensor, rows: Tensor, visible: int) -> None:
        """Take in `tokens` [B, N] of a prompt at `positions` [B, N] of `rows` [B]."""
        ...

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """Propose `gamma` tokens after the committed text of each row."""
        ...

    def swap(self, state_dict: dict[str, Tensor], version: str) -> None:
        """Take new weights in place, between rounds."""
        ...


class DraftModelProposer:
    """A small language model, with a cache of its own, sampled as the target is served."""

    has_cache = True

    def __init__(self, draft: Adapter, *, version: str = "") -> None:
        self.draft = draft
        self.version = version
        self.max_positions = draft.max_positions
        self._cache: SlotCache | None = None

    @property
    def signature(self) -> Hashable:
        """The architecture of the draft."""
        return (type(self), self.draft.signature)

    def allocate(self, slots: int, capacity: int) -> None:
        """Make an empty cache; called when the proposer is attached to a decoder."""
        self._cache = SlotCache(slots, capacity)

    def prefill(self, tokens: Tensor, *, positions: Tensor, rows: Tensor, visible: int) -> None:
        """Fill the draft's cache with a piece of the prompts."""
        assert self._cache is not None
        cache = self._cache.select(rows, visible=visible)
        self.draft.prefill(tokens, positions=positions, cache=cache)

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """Draw `gamma` tokens one after the other from the warped draft distribution.

        The first step feeds the last *two* tokens: after full acceptance the cache lacks the last
        proposal, and otherwise writing its slot again is harmless, so no branch is needed.
        """
        assert self._cache is not None
        cache = self._cache.select(view.group.rows, visible=view.visible)
        offsets = torch.arange(-2, 0, device=view.length.device)
        positions = (view.length[:, None] + offsets).clamp(min=0)  # [B, 2]
        logits = self.draft.step(view.last_two, positions=positions, cache=cache)[:, -1:]
        uniforms = view.uniform(count=gamma, purpose=DRAFT)  # [B, K]
        seen = view.seen
        tokens, draft_probs = [], []
        for i in range(gamma):
            history = None if seen is None else seen[:, None]
            probs = warp(logits, view.group.params, history)[:, 0]  # [B, V]
            token = sample(probs=probs, uniform=uniforms[:, i])
            tokens.append(token)
            draft_probs.append(probs)
            if seen is not None:
                seen = seen.scatter(1, token[:, None], True)
            if i + 1 < gamma:
                # A filler's text may end anywhere: it must not reach beyond the cache.
                positions = (view.length + i).clamp(max=cache.capacity - 1)[:, None]
                logits = self.draft.step(token[:, None], positions=positions, cache=cache)
        return Proposal(
            tokens=torch.stack(tokens, dim=1),
            draft_probs=torch.stack(draft_probs, dim=1),
            lengths=torch.full_like(view.length, gamma),
        )

    def swap(self, state_dict: dict[str, Tensor], version: str) -> None:
        """Copy new draft weights in place; rows keep their draft cache, which costs no exactness.

        Raises ValueError where the weights do not fit.
        """
        self.draft.load_weights(state_dict)
        self.version = version
