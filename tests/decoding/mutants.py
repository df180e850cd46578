"""Deliberately broken decoders, the tests of the tests, and proposers beside those that ship.

A mutant is a shipped module with one edit of its source (`tests.theory.mutants.mutate`), put in
the place of the original in an otherwise shipped decoder. `check_law` must reject each of them,
and pass the shipped decoder in the same settings (`test_mutants.py`).
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from draftkit.decoding import composite, decoder, proposers, state
from draftkit.decoding import round as units
from draftkit.decoding.catalogue import PROPOSERS
from draftkit.decoding.composite import StagedProposer
from draftkit.decoding.ngrams import CountTable, PromptLookup
from draftkit.decoding.proposers import (
    DraftModelProposer,
    HeadProposer,
    ParallelProposer,
    Proposal,
    Proposer,
)
from draftkit.decoding.state import RoundView
from draftkit.decoding.trees import tree_of
from draftkit.models import cache
from draftkit.theory.warping import warp
from tests.decoding.checks import (
    ALL,
    EVERY,
    PENALTY,
    PLAIN,
    PROMPT,
    Made,
    Parts,
    Setting,
    Text,
    in_turn,
    served,
)
from tests.tabular import TabularAdapter, TabularHead, TabularMedusa, random_adapter, with_masks
from tests.theory.checks import stops_after_token_one
from tests.theory.mutants import mutate

Make = Callable[[dict[str, Any], TabularAdapter], Proposer]  # of the names of a module


def plain(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["DraftModelProposer"](draft)


def ragged(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return CautiousProposer(draft)


def parallel(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["ParallelProposer"](with_masks(draft))


def staged(names: dict[str, Any], draft: TabularAdapter, passes: int = 2) -> Proposer:
    table = CountTable(random_adapter(draft.vocab_size, 9).table[0].log_softmax(-1))
    return names["StagedProposer"](table, DraftModelProposer(draft), width=1, passes=passes)


def staged_once(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return staged(names, draft, passes=1)


def hybrid(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["HybridProposer"](PromptLookup(), DraftModelProposer(draft))


def hybrid_parallel(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["HybridProposer"](PromptLookup(min_ngram=2), ParallelProposer(with_masks(draft)))


def head(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    made: Any = TabularHead(draft)
    return names["HeadProposer"](made)


def head_in_one_pass(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    made: Any = TabularHead(draft, parallel=True)
    return names["HeadProposer"](made)


def medusa(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    made: Any = TabularMedusa(draft)
    return names["MedusaProposer"](made)


def hybrid_head(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    made: Any = TabularHead(draft)
    return names["HybridProposer"](PromptLookup(min_ngram=2), HeadProposer(made))


def hybrid_of_one(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["HybridProposer"](PromptLookup(), DraftModelProposer(draft), draft_gamma=1)


TREE = tree_of([0, 0, 1, 1, 2], [0, 1, 0, 2, 1])


def tree(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["DraftModelProposer"](draft, tree=TREE)


def tree_by_depth(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["ParallelProposer"](with_masks(draft), tree=TREE)


def head_tree(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    made: Any = TabularHead(draft)
    return names["HeadProposer"](made, tree=TREE)


MAKERS: dict[str, Make] = {
    "head": head,
    "head in one pass": head_in_one_pass,
    "heads of Medusa": medusa,
    "hybrid of a head": hybrid_head,
    "parallel": parallel,
    "staged": staged,
    "staged once": staged_once,
    "hybrid": hybrid,
    "hybrid of parallel": hybrid_parallel,
    "hybrid whose drafter proposes one token": hybrid_of_one,
}
SHIPPED = vars(proposers) | vars(composite)


def named(name: str) -> Made:
    """What `decode.proposer=name` makes, with tables in float64, and staged in short passes.

    Single precision would be seen; a longer pass has more draws, all of which are bisected.
    """

    def make(draft: TabularAdapter) -> Proposer:
        generator = torch.Generator().manual_seed(3)
        texts = torch.randint(draft.vocab_size, (4, 20), generator=generator).tolist()
        made = PROPOSERS[name](lambda: draft, lambda: texts, draft)
        if isinstance(made, CountTable):
            made.table = made.table.double()
        if isinstance(made, StagedProposer):
            made.width = 1
        return made

    return make


ALL_PROPOSERS: dict[str, Made] = {name: named(name) for name in PROPOSERS} | {
    f"{name}, of a table": partial(make, SHIPPED) for name, make in MAKERS.items()
}


MIXED = Setting(samplings=EVERY)
SINGLE = Setting(gamma=1, samplings=EVERY)
ENDS = Setting(tokens=4, samplings=(PENALTY,), eos=(0, 2))
DRAWN = Setting(samplings=(PLAIN, ALL))
LONG = Setting(tokens=6)


class Edit(NamedTuple):
    """What is replaced in a module, by what, and in which setting and proposer that is seen."""

    module: ModuleType
    old: str
    new: str
    setting: Setting = MIXED
    make: Make = plain


EDITS: dict[str, Edit] = {
    "raw q told of warped proposals": Edit(
        proposers,
        "draft_probs.append(probs)",
        "draft_probs.append(logits[:, 0].softmax(-1))",
    ),
    "one uniform for all proposals": Edit(proposers, "uniforms[:, i]", "uniforms[:, 0]"),
    "draft feeds the last token alone": Edit(
        proposers,
        "self.draft.step(view.last_two, positions=positions, cache=cache, last=1)",
        "self.draft.step(token[:, None], positions=positions[:, 1:], cache=cache)",
        SINGLE,
    ),
    "draft positions shifted by one": Edit(
        proposers,
        "positions = (view.length + i - 1).clamp(max=cache.capacity - 1)[:, None]\n"
        "            return",
        "positions = (view.length + i).clamp(max=cache.capacity - 1)[:, None]\n            return",
    ),
    "penalty of proposals forgets proposals": Edit(
        proposers,
        "seen = seen.scatter(1, token[:, None], True)",
        "pass",
    ),
    "target positions shifted by one": Edit(
        units,
        "positions = first[:, None] + depths",
        "positions = first[:, None] + depths + 1",
    ),
    "target law unwarped": Edit(
        units,
        "target_probs = warp(logits, view.group.params, history)",
        "target_probs = logits.softmax(-1)",
    ),
    "penalty of the target forgets proposals": Edit(
        units,
        "seen_along(view.seen, proposal.tokens)",
        "seen_along(view.seen, proposal.tokens[:, :1].expand_as(proposal.tokens))",
    ),
    "penalty sees what was rejected": Edit(
        state,
        "else seen_tokens(tokens, length, ",
        "else seen_tokens(tokens, length + 1, ",
    ),
    "next token from the noise of the tests": Edit(units, "purpose=NEXT)", "purpose=ACCEPT)"),
    "next token in the place after": Edit(
        units,
        "candidates.scatter(1, verification.accepted[:, None], ",
        "candidates.scatter(1, (verification.accepted[:, None] + 1).clamp(max=group.gamma), ",
    ),
    "number of proposals ignored": Edit(
        units,
        "draft_tokens=proposal.tokens,\n        lengths=proposal.lengths,\n        accept",
        "draft_tokens=proposal.tokens,\n        lengths=None,\n        accept",
        DRAWN,
        ragged,
    ),
    "prompt fed one slot late": Edit(
        decoder,
        "positions = first[:, None] + torch",
        "positions = first[:, None] + 1 + torch",
    ),
    "text goes on after its end": Edit(
        units, "emitted = torch.minimum(accepted, first_end) + 1", "emitted = accepted + 1", ENDS
    ),
    "a rejected end of text ends": Edit(
        units, "ended = (first_end <= accepted) & ", "ended = ", ENDS
    ),
    "length limit ignored": Edit(
        units,
        "committed = torch.minimum(emitted, remaining)",
        "committed = emitted",
    ),
    "one greedy row makes all greedy": Edit(
        state,
        "uses_sampling=any(s.temperature > 0",
        "uses_sampling=all(s.temperature > 0",
    ),
    "sampling of the wrong rows": Edit(
        state,
        "[sampling.get(slot, sampling[slots[0]]) for slot in index]",
        "[sampling.get(slot, sampling[slots[0]]) for slot in reversed(index)]",
    ),
    "temperature in single precision": Edit(
        state,
        "state.tokens.device, torch.float64)",
        "state.tokens.device, torch.float32)",
    ),
    # Composite proposers
    "staged states the law of the guesser": Edit(
        composite,
        "return tokens, verification.accepted + 1, law",
        "law = torch.cat([guess.draft_probs, law[:, 1:]], dim=1)\n"
        "        return tokens, verification.accepted + 1, law",
        DRAWN,
        staged_once,
    ),
    "staged takes guesses untested": Edit(
        composite, "accept_uniform=accept,", "accept_uniform=0,", DRAWN, staged_once
    ),
    "staged draws guess and test with one number": Edit(
        composite, "accept_uniform=accept,", "accept_uniform=own,", DRAWN, staged_once
    ),
    "staged proposes what no pass has drawn": Edit(
        composite,
        "ends[:, -1].clamp(max=gamma)",
        "ends[:, -1].clamp(min=gamma)",
        DRAWN,
        staged_once,
    ),
    "staged draws all passes with the same numbers": Edit(
        composite,
        "self._pass(now, width, uniforms[i], end)",
        "self._pass(now, width, uniforms[0], end)",
        DRAWN,
        staged,
    ),
    "staged does not move on between passes": Edit(
        composite,
        "now = replace(now, **text_of(tokens, length, vocab_size))",
        "pass",
        DRAWN,
        staged,
    ),
    "staged draws numbers that later rounds draw again": Edit(
        composite, "replace(view, noise=lambda **_: own)", "view", DRAWN, staged
    ),
    "hybrid chooses by what the model draws": Edit(
        composite,
        "is_guessed = guess.lengths > 0",
        "drawn = self.model.propose(view, gamma).tokens[:, 0]\n"
        "        is_guessed = (guess.lengths > 0) & (drawn == guess.tokens[:, 0])",
        DRAWN,
        hybrid,
    ),
    "hybrid lets the model read other tokens than are proposed": Edit(
        composite,
        "proposal = self.model.propose(view, gamma, decided)",
        "own = self.model.propose(view, gamma)\n"
        "        tokens = torch.where(is_guessed[:, None], guess.tokens, own.tokens)\n"
        "        certain = torch.nn.functional.one_hot(tokens, 3).double()\n"
        "        law = torch.where(is_guessed[:, None, None], certain, own.draft_probs)\n"
        "        proposal = Proposal(tokens, law, lengths=own.lengths)",
        LONG,
        hybrid,
    ),
    # Heads
    "features of the wrong token": Edit(
        proposers,
        "view.features((positions - 1).clamp",
        "view.features((positions).clamp",
        LONG,
        head,
    ),
    "the state of a proposal stays for features": Edit(
        proposers, "text = view.group.most + 1  # ", "text = 1  # ", Setting(tokens=4), head
    ),
    "a state of two steps before": Edit(
        proposers,
        "state = self.draft.feed(token[:, None], state, ",
        "self.draft.feed(token[:, None], state, ",
        DRAWN,
        head,
    ),
    "masks with features of the text": Edit(
        proposers,
        "torch.where(is_text[:, None], features, self.draft.mask_features)",
        "features",
        DRAWN,
        head_in_one_pass,
    ),
    "hidden states one slot late": Edit(
        cache,
        "[:, None], self._positions] = states",
        "[:, None], (self._positions + 1).clamp(max=self.capacity - 1)] = states",
        LONG,
        head,
    ),
    "masks of the last round stay": Edit(
        proposers, "text = view.group.most + 1  # ", "text = 2  # ", Setting(tokens=4), parallel
    ),
    "parallel proposals in another order than their laws": Edit(
        proposers,
        "Proposal(sample(probs=probs, uniform=uniforms), probs, lengths",
        "Proposal(sample(probs=probs, uniform=uniforms), probs.flip(1), lengths",
        DRAWN,
        parallel,
    ),
}


# Trees
EDITS |= {
    "a node's position off by one": Edit(
        units, "else tree.depths", "else tree.depths + (tree.depths > 1)", DRAWN, tree_by_depth
    ),
    "keys of rejected nodes stay": Edit(
        units, "bench.cache.move(source", "(lambda *_: None)(source", DRAWN, tree_by_depth
    ),
    "a path tested by other numbers than it was found by": Edit(
        units, "uniform=draws[0][:, depth])", "uniform=draws[0][:, -1])", DRAWN, tree_by_depth
    ),
    "nodes see their siblings": Edit(
        cache,
        "on_path = branches.seen[:, known]",
        "on_path = torch.ones_like(branches.seen)[:, known]",
        DRAWN,
        tree_by_depth,
    ),
    "streams of rejected nodes stay": Edit(
        cache, "stream[rows, target] = stream[rows, source]", "pass", DRAWN, head_tree
    ),
    "a path moved from its end": Edit(
        cache,
        "buffer[rows, :, target] = buffer[rows, :, source]",
        "for a, b in zip(source.T.flip(0), target.T.flip(0)):\n"
        "                buffer[rows, :, b[:, None]] = buffer[rows, :, a[:, None]]",
        LONG,
        tree_by_depth,
    ),
    "nodes of the last round stay with the draft": Edit(
        proposers,
        "positions, _ = behind(view, 0, self._cache.capacity)",
        "positions, _ = (part[..., -2:] for part in behind(view, 0, self._cache.capacity))",
        LONG,
        tree,
    ),
}


def mutant(name: str) -> Parts:
    """A decoder with the edit of that name, and a proposer of its kind."""
    module, old, new, _, make = EDITS[name]
    names = vars(mutate(module, old, new))
    if module in (proposers, composite):
        return parts_of(make, names)
    if module is decoder:
        return Parts(decoder=names["Decoder"])
    copied = mutate(decoder, '"""The speculative decoder', '"""A speculative decoder')
    copied_units = mutate(units, '"""One round', '"""A round')
    if module is units:
        vars(copied_units).update(names)
    for place in (copied, copied_units):
        own = vars(place)
        for key in ("make_group", "text_of", "SlotCache"):
            if key in names and key in own and inspect.getmodule(own[key]) is module:
                own[key] = names[key]
    vars(copied)["units"] = copied_units
    return replace(parts_of(make), decoder=vars(copied)["Decoder"])


def parts_of(make: Make = plain, names: dict[str, Any] = SHIPPED) -> Parts:
    """The shipped decoder with a proposer of that kind."""
    return Parts(proposer=partial(make, names), proposals=KNOWN.get(make))


def by_head(setting: Setting, *, parallel: bool = False) -> Callable[[int, Text, Text], float]:
    """The law of a head's proposals: each knows the text, what it has of it, and its block."""
    made = TabularHead(setting.draft(), parallel=parallel)

    def law(which: int, text: Text, block: Text) -> float:
        product = 1.0
        for n, token in enumerate(block):
            whole = torch.tensor([*PROMPT, *text, *block[:n]])
            seen = whole[: len(PROMPT) + len(text)] if parallel else whole
            given: Any = SimpleNamespace(logits=lambda _, n=n, t=whole: made.law(t, n)[None, None])
            product *= float(served(given, seen[None], setting.samplings[which])[0, token])
        return product

    return law


KNOWN = {plain: in_turn, head: by_head, head_in_one_pass: partial(by_head, parallel=True)}


class CautiousProposer(DraftModelProposer):
    """No mutant: the number of its proposals depends on their tokens; garbage follows them."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        tokens, draft_probs, _ = super().propose(view, gamma)
        assert draft_probs is not None
        lengths = stops_after_token_one(tokens)
        beyond = torch.arange(gamma) >= lengths[:, None]
        garbage = draft_probs.masked_fill(beyond[..., None], 1 / draft_probs.shape[-1])
        return Proposal(tokens.masked_fill(beyond, 0), garbage, lengths)


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
