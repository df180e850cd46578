"""Deliberately broken decoders: the tests of the tests.

A mutant is a shipped module with one edit of its source (`tests.theory.mutants.mutate`), put in
the place of the original in an otherwise shipped decoder. `test_mutants.py` names the check that
must reject each of them.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from draftkit.decoding import composite, decoder, feeding, proposers, state
from draftkit.decoding import round as units
from draftkit.decoding.ngrams import CountTable, PromptLookup
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer
from draftkit.decoding.state import RoundView
from draftkit.models import cache
from draftkit.theory.warping import SamplingParams, warp
from tests.decoding.checks import Parts
from tests.tabular import TabularAdapter, random_adapter, with_masks
from tests.theory.checks import stops_after_token_one
from tests.theory.mutants import mutate

# name: (module, what is replaced in it, by what)
EDITS: dict[str, tuple[ModuleType, str, str]] = {
    "raw q told of warped proposals": (
        proposers,
        "draft_probs.append(probs)",
        "draft_probs.append(logits[:, 0].softmax(-1))",
    ),
    "one uniform for all proposals": (proposers, "uniforms[:, i]", "uniforms[:, 0]"),
    "draft feeds the last token alone": (
        proposers,
        "self.draft.step(view.last_two, positions=positions, cache=cache, last=1)",
        "self.draft.step(token[:, None], positions=positions[:, 1:], cache=cache)",
    ),
    "draft positions shifted by one": (
        proposers,
        "positions = (view.length + i - 1).clamp(",
        "positions = (view.length + i).clamp(",
    ),
    "penalty of proposals forgets proposals": (
        proposers,
        "seen = seen.scatter(1, token[:, None], True)",
        "pass",
    ),
    "target positions shifted by one": (
        units,
        "positions = view.length[:, None] - 1 + torch",
        "positions = view.length[:, None] + torch",
    ),
    "target law unwarped": (
        units,
        "target_probs = warp(logits, view.group.params, history)",
        "target_probs = logits.softmax(-1)",
    ),
    "penalty of the target forgets proposals": (
        units,
        "seen_along(view.seen, proposal.tokens)",
        "seen_along(view.seen, proposal.tokens[:, :1].expand_as(proposal.tokens))",
    ),
    "penalty sees what was rejected": (
        state,
        "else seen_tokens(tokens, length, ",
        "else seen_tokens(tokens, length + 1, ",
    ),
    "next token from the noise of the tests": (units, "purpose=NEXT)", "purpose=ACCEPT)"),
    "next token in the place after": (
        units,
        "candidates.scatter(1, verification.accepted[:, None], ",
        "candidates.scatter(1, (verification.accepted[:, None] + 1).clamp(max=group.gamma), ",
    ),
    "number of proposals ignored": (
        units,
        "draft_tokens=proposal.tokens,\n        lengths=proposal.lengths,\n        accept",
        "draft_tokens=proposal.tokens,\n        lengths=None,\n        accept",
    ),
    "prompt fed one slot late": (
        feeding,
        "positions = first[:, None] + torch",
        "positions = first[:, None] + 1 + torch",
    ),
    "text goes on after its end": (
        units,
        "emitted = torch.minimum(accepted, first_end) + 1",
        "emitted = accepted + 1",
    ),
    "a rejected end of text ends": (
        units,
        "ended = (first_end <= accepted) & ",
        "ended = ",
    ),
    "length limit ignored": (
        units,
        "committed = torch.minimum(emitted, remaining)",
        "committed = emitted",
    ),
    "one greedy row makes all greedy": (
        state,
        "uses_sampling=any(s.temperature > 0",
        "uses_sampling=all(s.temperature > 0",
    ),
    "sampling of the wrong rows": (
        state,
        "[sampling.get(slot, sampling[slots[0]]) for slot in index]",
        "[sampling.get(slot, sampling[slots[0]]) for slot in reversed(index)]",
    ),
    "temperature in single precision": (
        state,
        "state.tokens.device, torch.float64)",
        "state.tokens.device, torch.float32)",
    ),
    "cache of other rows": (
        cache,
        "return seen[self._selected]\n",
        "return seen[self._selected.flip(0)]\n",
    ),
    # Composite proposers
    "staged states the law of the guesser": (
        composite,
        "return tokens, verification.accepted + 1, law",
        "law = torch.cat([guess.draft_probs, law[:, 1:]], dim=1)\n"
        "        return tokens, verification.accepted + 1, law",
    ),
    "staged takes guesses untested": (composite, "accept_uniform=accept,", "accept_uniform=0,"),
    "staged draws guess and test with one number": (
        composite,
        "accept_uniform=accept,",
        "accept_uniform=own,",
    ),
    "staged proposes what no pass has drawn": (
        composite,
        "ends[:, -1].clamp(max=gamma)",
        "ends[:, -1].clamp(min=gamma)",
    ),
    "staged draws all passes with the same numbers": (
        composite,
        "self._pass(now, width, uniforms[i], end)",
        "self._pass(now, width, uniforms[0], end)",
    ),
    "staged does not move on between passes": (
        composite,
        "now = _after(now, new, kept, end)",
        "pass",
    ),
    "staged draws numbers that later rounds draw again": (
        composite,
        "replace(view, noise=lambda **_: own)",
        "view",
    ),
    "hybrid chooses by what the model draws": (
        composite,
        "is_guessed = guess.lengths > 0",
        "drawn = self.model.propose(view, gamma).tokens[:, 0]\n"
        "        is_guessed = (guess.lengths > 0) & (drawn == guess.tokens[:, 0])",
    ),
    "hybrid lets the model read other tokens than are proposed": (
        composite,
        "proposal = self.model.propose(view, gamma, decided)",
        "own = self.model.propose(view, gamma)\n"
        "        tokens = torch.where(is_guessed[:, None], guess.tokens, own.tokens)\n"
        "        certain = torch.nn.functional.one_hot(tokens, 3).double()\n"
        "        law = torch.where(is_guessed[:, None, None], certain, own.draft_probs)\n"
        "        proposal = Proposal(tokens, law, lengths=guess.lengths)",
    ),
    "parallel proposals in another order than their laws": (
        proposers,
        "tokens, draft_probs = sample(probs=probs, uniform=uniforms), probs",
        "tokens, draft_probs = sample(probs=probs, uniform=uniforms), probs.flip(1)",
    ),
}
Make = Callable[[dict[str, Any], TabularAdapter], Proposer]  # of the names of a module


def plain(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["DraftModelProposer"](draft)


def parallel(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["ParallelProposer"](with_masks(draft))


def staged(names: dict[str, Any], draft: TabularAdapter, passes: int = 2) -> Proposer:
    table = CountTable(random_adapter(draft.vocab_size, 9).table[0].log_softmax(-1))
    return names["StagedProposer"](table, DraftModelProposer(draft), width=1, passes=passes)


def staged_once(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return staged(names, draft, passes=1)


def hybrid(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["HybridProposer"](PromptLookup(), DraftModelProposer(draft))


def shipped(make: Make) -> Parts:
    """The shipped decoder with a proposer of that kind."""
    return Parts(proposer=partial(make, vars(proposers) | vars(composite)))


def mutant(name: str, make: Make = plain) -> Parts:
    """A decoder with the edit of that name, and a proposer of that kind."""
    module, old, new = EDITS[name]
    names = vars(mutate(module, old, new))
    if module in (proposers, composite):
        return Parts(proposer=partial(make, names))
    if module is decoder:
        return Parts(decoder=names["Decoder"])
    copied = mutate(decoder, '"""The speculative decoder', '"""A speculative decoder')
    copied_units = mutate(units, '"""One round', '"""A round')
    if module is units:
        vars(copied_units).update(names)
    for place in (copied, copied_units):
        own = vars(place)
        for key in ("make_group", "text_of", "SlotCache", "feed"):
            if key in names and key in own and inspect.getmodule(own[key]) is module:
                own[key] = names[key]
    vars(copied)["units"] = copied_units
    return Parts(decoder=vars(copied)["Decoder"])


class CautiousProposer(DraftModelProposer):
    """No mutant: the number of its proposals depends on their tokens; garbage follows them."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        tokens, draft_probs, _ = super().propose(view, gamma)
        assert draft_probs is not None
        lengths = stops_after_token_one(tokens)
        beyond = torch.arange(gamma) >= lengths[:, None]
        garbage = draft_probs.masked_fill(beyond[..., None], 1 / draft_probs.shape[-1])
        return Proposal(tokens.masked_fill(beyond, 0), garbage, lengths)


class PointingProposer(DraftModelProposer):
    """No mutant: its proposals are the draft's most likely tokens, so q is one-hot."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        params = SamplingParams.uniform(len(view.length), temperature=0.0)
        view = replace(view, group=replace(view.group, params=params), seen=None)
        return super().propose(view, gamma)._replace(draft_probs=None)


class RecomputingProposer(DraftModelProposer):
    """A mutant: q is computed anew from the text, by weights that may be newer than the cache."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        proposal = super().propose(view, gamma)
        model: Any = self.draft
        written = self._cache._keys[0][view.group.index, 0, :, 0].long() - 1  # the text
        logits = model.logits(written.clamp(min=0))
        at = view.length[:, None] - 1 + torch.arange(gamma)
        logits = logits.gather(1, at[..., None].expand(-1, -1, model.vocab_size))
        return proposal._replace(draft_probs=warp(logits, view.group.params))
