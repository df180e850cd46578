"""Deliberately broken decoders: the tests of the tests.

A mutant is a shipped module with one edit of its source (`tests.theory.mutants.mutate`), put in
the place of the original in an otherwise shipped decoder. `test_mutants.py` names the check that
must reject each of them.
"""

import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from draftkit.decoding import cache, decoder, proposers, state, stopping
from draftkit.decoding.proposers import DraftModelProposer, Proposal
from draftkit.decoding.state import RoundView
from draftkit.theory.warping import SamplingParams, warp
from tests.decoding.checks import Parts
from tests.theory.checks import stops_after_token_one
from tests.theory.mutants import mutate

# name: (module, what is replaced in it, by what)
EDITS: dict[str, tuple[ModuleType, str, str]] = {
    "raw q told of warped proposals": (
        proposers,
        "draft_probs.append(probs)",
        "draft_probs.append(logits[:, 0].softmax(-1))",
    ),
    "proposals from the noise of the tests": (proposers, "purpose=DRAFT", "purpose=1"),
    "one uniform for all proposals": (proposers, "uniforms[:, i]", "uniforms[:, 0]"),
    "draft feeds the last token alone": (
        proposers,
        "self.draft.step(view.last_two, positions=positions, cache=cache)",
        "self.draft.step(view.last_two[:, 1:], positions=positions[:, 1:], cache=cache)",
    ),
    "draft positions shifted by one": (
        proposers,
        "positions=(view.length + i)[:, None]",
        "positions=(view.length + i + 1)[:, None]",
    ),
    "penalty of proposals forgets proposals": (
        proposers,
        "seen = seen.scatter(1, token[:, None], True)",
        "pass",
    ),
    "target positions shifted by one": (
        decoder,
        "positions = view.length[:, None] - 1 + torch",
        "positions = view.length[:, None] + torch",
    ),
    "target law unwarped": (
        decoder,
        "target_probs = warp(logits, group.params, history)",
        "target_probs = logits.softmax(-1)",
    ),
    "penalty of the target forgets proposals": (
        decoder,
        "seen_along(view.seen, proposal.tokens)",
        "seen_along(view.seen, proposal.tokens[:, :1].expand_as(proposal.tokens))",
    ),
    "penalty sees what was rejected": (
        decoder,
        "seen = seen_tokens(tokens, length, ",
        "seen = seen_tokens(tokens, length + 1, ",
    ),
    "next token from the noise of the tests": (decoder, "purpose=NEXT)", "purpose=ACCEPT)"),
    "next token in the place after": (
        decoder,
        "candidates.scatter(1, verdict.accepted[:, None], ",
        "candidates.scatter(1, (verdict.accepted[:, None] + 1).clamp(max=group.gamma), ",
    ),
    "one rejected proposal committed": (
        decoder,
        "accepted=verdict.accepted,\n            remaining",
        "accepted=(verdict.accepted + 1).clamp(max=group.gamma),\n            remaining",
    ),
    "number of proposals ignored": (
        decoder,
        "draft_tokens=proposal.tokens,\n            lengths=proposal.lengths,\n            accept",
        "draft_tokens=proposal.tokens,\n            lengths=None,\n            accept",
    ),
    "prompt fed one slot late": (
        decoder,
        "positions = first[:, None] + torch",
        "positions = first[:, None] + 1 + torch",
    ),
    "text goes on after its end": (
        stopping,
        "emitted = torch.minimum(accepted, first_end) + 1",
        "emitted = accepted + 1",
    ),
    "a rejected end of text ends": (
        stopping,
        "ended = (first_end <= accepted) & ",
        "ended = ",
    ),
    "length limit ignored": (
        stopping,
        "committed = torch.minimum(emitted, remaining)",
        "committed = emitted",
    ),
    "one greedy row makes all greedy": (
        state,
        "greedy=all(s.temperature == 0",
        "greedy=any(s.temperature == 0",
    ),
    "sampling of the wrong rows": (
        state,
        "[state.requests[slot].sampling for slot in slots]",
        "[state.requests[slot].sampling for slot in reversed(slots)]",
    ),
    "temperature in single precision": (
        state,
        "torch.tensor(values, dtype=torch.float64, device=device)",
        "torch.tensor(values, device=device)",
    ),
    "cache slots shifted by one": (
        cache,
        "self._positions = positions",
        "self._positions = positions + 1",
    ),
    "cache of other rows": (cache, "seen[self._selected]", "seen[self._selected.flip(0)]"),
}


def mutant(name: str) -> Parts:
    """A decoder with the edit of that name."""
    module, old, new = EDITS[name]
    names = vars(mutate(module, old, new))
    if module is proposers:
        return Parts(proposer=names["DraftModelProposer"])
    if module is decoder:
        return Parts(decoder=names["Decoder"])
    own: dict[str, Any] = {
        key: names[key]
        for key in ("cut_round", "make_group", "SlotCache")
        if key in names and inspect.getmodule(vars(decoder)[key]) is module
    }
    copied = mutate(decoder, '"""The speculative decoder', '"""A speculative decoder')
    vars(copied).update(own)
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
        assert self._cache is not None
        written = self._cache._keys[0][view.group.index, :, 0, 0].long() - 1  # the text
        logits = model.logits(written.clamp(min=0))
        at = view.length[:, None] - 1 + torch.arange(gamma)
        logits = logits.gather(1, at[..., None].expand(-1, -1, model.vocab_size))
        return proposal._replace(draft_probs=warp(logits, view.group.params))
