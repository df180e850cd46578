"""Proposers made of two: a guesser that runs no model, and a draft model that knows better.

*Hybrid*: a row whose text the guesser can go on is its own, any other the model's. The choice
looks at committed text alone, so that q is one-hot or the model's law, as the case may be.

*Staged* (Spector and Re, arXiv 2308.04623): the guesser drafts for the draft model, which decodes
speculatively in turn: one pass of it yields one token more than it accepts. What comes out has the
model's own served law, token by token; only how many tokens there are depends on the guesses.
That is lawful, since whether another token follows is known before it is drawn. (It would not be
with block verification inside, which looks ahead.)

Shapes: B rows, L tokens a row can hold, K proposed tokens (gamma), W guesses a pass, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer
from draftkit.decoding.state import RoundView, text_of
from draftkit.theory.noise import DRAFT
from draftkit.theory.verification import speculative_sampling
from draftkit.theory.warping import seen_along, warp


class Composite(Proposer):
    """A model with a guesser, which keeps no cache: cache and weights are the model's."""

    has_cache = True

    def __init__(self, guesser: Proposer, model: DraftModelProposer) -> None:
        assert not guesser.has_cache
        self.model = model
        self.version = model.version
        self.max_positions = model.max_positions
        self.reads = model.reads

    def allocate(self, slots: int, capacity: int, encoder_capacity: int = 0) -> None:
        self.model.allocate(slots, capacity, encoder_capacity)

    def encode(self, tokens: Tensor, *, lengths: Tensor, rows: Tensor) -> None:
        self.model.encode(tokens, lengths=lengths, rows=rows)

    def prefill(self, tokens: Tensor, **given: Any) -> None:
        self.model.prefill(tokens, **given)

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def swap(self, state_dict: dict[str, Tensor], version: str) -> None:
        self.model.swap(state_dict, version)
        self.version = version


class HybridProposer(Composite):
    """The guesser where it has a guess, the model elsewhere, row by row.

    How sure a guess must be is the guesser's setting (`min_ngram`); it must guess one-hot.
    draft_gamma: the most tokens that the model proposes. No model runs for a guess, so that longer
    ones pay. On CUDA the host cannot leave the model out of a round, so both are equally long.
    """

    def __init__(
        self, guesser: PromptLookup, model: DraftModelProposer, *, draft_gamma: int | None = None
    ) -> None:
        super().__init__(guesser, model)
        self.guesser = guesser
        self.draft_gamma = draft_gamma

    @property
    def on_cuda(self) -> bool:
        """Whether the host cannot look at the text before a round."""
        return self.model.draft.device.type == "cuda"

    def drafts(self, gamma: int) -> int:
        """How many tokens the model proposes where a guess has `gamma`."""
        return gamma if self.on_cuda else min(gamma, self.draft_gamma or gamma)

    def pick(self, view: RoundView) -> tuple[Proposer, int]:
        """The guesser if all rows have a guess, the model if none has: its passes cost time."""
        gamma = view.group.gamma
        guessed = self.guesser.propose(view, gamma).lengths[view.group.active] > 0
        if guessed.all():
            return self.guesser, gamma
        return (self, gamma) if guessed.any() else (self.model, self.drafts(gamma))

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """Let the model draw, with logits that leave no choice in the rows that are guessed.

        So the model reads guesses as it would its own tokens, and its cache stays that of the text.
        """
        guess = self.guesser.propose(view, gamma)
        assert guess.draft_probs is None, "a hybrid needs one-hot guesses"
        is_guessed = guess.lengths > 0

        def decided(logits: Tensor, i: int) -> Tensor:
            tokens = guess.tokens[:, i : i + logits.shape[1], None]
            certain = torch.full_like(logits, -torch.inf).scatter(2, tokens, 0.0)
            return torch.where(is_guessed[:, None, None], certain, logits)

        proposal = self.model.propose(view, gamma, decided)
        own = proposal.lengths.clamp(max=self.drafts(gamma))
        lengths = torch.where(is_guessed, guess.lengths, own)
        return Proposal(proposal.tokens, proposal.draft_probs, lengths=lengths)


class StagedProposer(Composite):
    """The guesser drafts `width` tokens for each of `passes` passes of the model.

    A round has between `passes` and `gamma` proposals; passes * (width + 1) should reach gamma.
    """

    def __init__(
        self, guesser: Proposer, model: DraftModelProposer, *, width: int = 3, passes: int = 2
    ) -> None:
        super().__init__(guesser, model)
        self.guesser = guesser
        self.width = width
        self.passes = passes

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        view = self.model.served(view)
        width, count = min(self.width, gamma), min(self.passes, gamma)
        # All noise of the round is keyed by its own length: the text of a pass may come again.
        share = 2 * width + 1
        uniforms = view.uniform(count=count * share, purpose=DRAFT).split(share, dim=1)
        # Positions past this round's proposals are scratch: they are clamped to one slot.
        end = (view.length + gamma).clamp(max=view.tokens.shape[1] - 1)
        vocab_size = None if view.seen is None else view.seen.shape[1]
        now, passes = view, []
        for i in range(count):
            if i > 0:  # the tokens of the last pass that count stand behind the text, up to `end`
                new, kept, _ = passes[-1]
                positions = now.length[:, None] + torch.arange(width + 1, device=end.device)
                tokens = now.tokens.scatter(1, torch.minimum(positions, end[:, None]), new)
                length = torch.minimum(now.length + kept, end)
                now = replace(now, **text_of(tokens, length, vocab_size))
            passes.append(self._pass(now, width, uniforms[i], end))
        drawn, counts, laws = zip(*passes, strict=True)
        # Where the first `gamma` of the tokens that count lie among all [B, P (W + 1)].
        counted = torch.stack(counts, dim=1)  # [B, P]
        ends = counted.cumsum(1)
        order = torch.arange(gamma, device=ends.device).expand(len(ends), -1)  # [B, K]
        of = (order[..., None] >= ends[:, None]).sum(-1).clamp(max=count - 1)  # the pass of each
        index = of * (width + 1) + order - (ends - counted).gather(1, of)
        index = index.clamp(max=count * (width + 1) - 1)
        tokens = torch.cat(drawn, dim=1).gather(1, index)
        lengths = ends[:, -1].clamp(max=gamma)
        if view.group.greedy:
            return Proposal(tokens, None, lengths=lengths)
        rows = torch.arange(len(index), device=index.device)[:, None]
        return Proposal(tokens, torch.cat(laws, dim=1)[rows, index], lengths=lengths)

    def _pass(
        self, view: RoundView, width: int, uniforms: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One round of speculative decoding, with the model as the target.

        Returns tokens [B, W + 1], how many of them count [B], and the law [B, W + 1, V] of each.
        """
        own, accept, then = uniforms.split([width, width, 1], dim=1)
        guess = self.guesser.propose(replace(view, noise=lambda **_: own), width)
        fed = torch.cat([view.last_two, guess.tokens], dim=1)  # two, as in every first step
        positions = view.length[:, None] + torch.arange(-2, width, device=fed.device)
        positions = torch.minimum(positions, end[:, None]).clamp(min=0)
        cache = self.model.cache(view)
        logits = self.model.draft.step(fed, positions=positions, cache=cache, last=width + 1)
        history = None if view.seen is None else seen_along(view.seen, guess.tokens)
        law = warp(logits, view.group.params, history)  # [B, W + 1, V]
        verification = speculative_sampling(
            target_probs=law,
            draft_probs=guess.draft_probs,
            draft_tokens=guess.tokens,
            lengths=guess.lengths,
            accept_uniform=accept,
            next_uniform=then[:, 0],
        )
        accepted, next_token = verification.accepted[:, None], verification.next_token[:, None]
        tokens = torch.cat([guess.tokens, next_token], dim=1).scatter(1, accepted, next_token)
        return tokens, verification.accepted + 1, law
