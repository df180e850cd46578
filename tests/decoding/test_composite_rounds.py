"""Composite proposers over many rounds: the text in the cache, the noise, the joint law."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import composite
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, finish
from draftkit.decoding.ngrams import CountTable, PromptLookup
from draftkit.decoding.proposers import (
    DraftModelProposer,
    Proposer,
)
from draftkit.decoding.state import Request, RoundView
from draftkit.models.cache import SlotCache
from draftkit.theory import noise
from tests.decoding.boxes import measured
from tests.decoding.checks import Setting, check_joint_law
from tests.decoding.driving import assert_same, drive, strict_compiler
from tests.decoding.stand import run
from tests.tabular import TabularAdapter, random_adapter, relative
from tests.theory import checks as theory_checks
from tests.theory.laws import LawBroken
from tests.theory.mutants import mutate

WARM = SamplingConfig(temperature=0.7)
GREEDY = SamplingConfig(temperature=0.0)
PENALTY = SamplingConfig(repetition_penalty=1.5)


# Rounds after rounds


@dataclass
class Seen:
    """What was found in the draft's cache whenever the model was about to read on."""

    rows: int = 0
    stale: int = 0
    picks: list[str] = field(default_factory=list)


class WatchedModel(DraftModelProposer):
    """Compares its cache with a fresh pass over the text, as far as no step will write it anew."""

    def __init__(self, draft: TabularAdapter, seen: Seen) -> None:
        super().__init__(draft)
        self.seen = seen

    def cache(self, view: RoundView) -> SlotCache:
        cache = super().cache(view)
        if not cache._keys:  # one-token texts that nothing has read
            return cache
        rows, width = view.group.index, view.tokens.shape[1]
        fresh = SlotCache(len(rows), width)
        positions = torch.arange(width).expand(len(rows), -1)
        self.draft.step(view.tokens, positions=positions, cache=fresh)
        held = (torch.arange(width) < view.length[:, None] - 2) & view.group.active[:, None]
        for own, new in ((cache._keys, fresh._keys), (cache._values, fresh._values)):
            odd = (own[0][rows] != new[0]).transpose(1, 2).flatten(2).any(-1) & held
            self.seen.stale += int(odd.sum())
        self.seen.rows += int(held.any(1).sum())
        return cache


class WatchedHybrid(HybridProposer):
    """Remembers what it picked."""

    def pick(self, view: RoundView) -> Proposer:
        part = super().pick(view)
        assert isinstance(self.model, WatchedModel)
        names = {id(self): "both", id(self.model): "model"}
        self.model.seen.picks.append(names.get(id(part), "guesser"))
        return part


def requests_of(count: int, sampling: SamplingConfig, new: int = 40) -> list[Request]:
    """Prompts of different lengths; every second text repeats itself."""
    prompts = [[row % 8, 1, 2] * 3 if row % 2 else [row % 8, 5, (row + 3) % 8] for row in range(4)]
    return [
        Request(
            prompt_ids=prompts[row % 4][: 9 - row % 3],
            max_new_tokens=new - 7 * (row % 3),
            sampling=sampling,
            gamma=3,
            proposer_id=DRAFT_ID,
            seed=5,
            row=row,
        )
        for row in range(count)
    ]


def answers_of(proposer: Proposer, requests: list[Request], slots: int) -> list[list[int]]:
    decoder = Decoder(relative(random_adapter(8, 1), 2, spread=0.5), slots=slots, capacity=72)
    decoder.attach(DRAFT_ID, proposer)
    return [completion.output_ids for completion in finish(decoder, requests)]


def watched(kind: str, seen: Seen) -> Proposer:
    model = WatchedModel(random_adapter(8, 1), seen)
    if kind == "hybrid":
        return WatchedHybrid(PromptLookup(min_ngram=2), model)
    return drawn_of(model) if kind == "drawn" else StagedProposer(PromptLookup(), model, width=2)


def drawn_of(model: DraftModelProposer) -> StagedProposer:
    return StagedProposer(CountTable(torch.zeros(8).double()), model, width=2)


@pytest.mark.parametrize("sampling", [WARM, PENALTY, GREEDY])
@pytest.mark.parametrize("kind", ["hybrid", "staged", "drawn"])
def test_the_models_cache_is_that_of_the_text_whoever_proposed_before(
    kind: str, sampling: SamplingConfig
) -> None:
    seen = Seen()
    answers_of(watched(kind, seen), requests_of(7, sampling), slots=2)
    assert seen.stale == 0
    assert seen.rows > 30


def test_rounds_of_guesser_model_and_both_alternate_and_the_model_catches_up() -> None:
    seen = Seen()
    for slots in (1, 2):
        answers_of(watched("hybrid", seen), requests_of(7, WARM), slots)
    following = set(pairwise(seen.picks))
    assert {("guesser", "model"), ("guesser", "both"), ("both", "guesser")} <= following
    assert seen.stale == 0


@pytest.mark.parametrize("kind", ["hybrid", "staged", "drawn"])
def test_a_row_gets_the_same_tokens_alone_and_beside_others(kind: str) -> None:
    requests = requests_of(6, WARM)
    together = answers_of(watched(kind, Seen()), requests, slots=4)
    alone = [answers_of(watched(kind, Seen()), [request], slots=1)[0] for request in requests]
    assert together == alone


@pytest.mark.parametrize("kind", ["hybrid", "drawn"])
def test_compiled_rounds_yield_what_eager_ones_do(kind: str) -> None:
    """Whatever is picked: no guard looks at what code was made for."""
    target, requests = relative(random_adapter(8, 1), 2, spread=0.5), requests_of(5, WARM, new=24)
    answers = []
    for compiled in (False, True):
        decoder = Decoder(target, slots=4, capacity=72, compiled=compiled)
        model = DraftModelProposer(random_adapter(8, 1))
        proposer: Proposer = drawn_of(model)
        if kind == "hybrid":
            proposer = HybridProposer(PromptLookup(min_ngram=2), model)
        decoder.attach(DRAFT_ID, proposer)
        with strict_compiler():
            answers.append(drive(decoder, requests))
    assert_same(answers[1], answers[0], atol=1e-10)


def test_no_number_is_drawn_twice() -> None:
    """Guesses of later passes included, though their text comes again in later rounds."""
    keys: list[tuple[int, ...]] = []

    def listening(**key: Any) -> Tensor:
        offsets = range(key.get("first", 0), key.get("first", 0) + key["count"])
        rows = torch.stack([key["row"], key["length"]], dim=1).tolist()
        keys.extend((*row, key["purpose"], offset) for row in rows for offset in offsets)
        return noise.uniform(**key)

    decoder = Decoder(random_adapter(8, 1), slots=4, capacity=72, noise_function=listening)
    decoder.attach(DRAFT_ID, watched("drawn", Seen()))
    finish(decoder, requests_of(4, WARM))
    assert len(keys) == len(set(keys)) > 500


# What must not pass


def staged(names: dict[str, Any], draft: TabularAdapter, passes: int = 2) -> Proposer:
    table = CountTable(random_adapter(draft.vocab_size, 9).table[0].log_softmax(-1))
    return names["StagedProposer"](table, DraftModelProposer(draft), width=1, passes=passes)


def one_pass(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return staged(names, draft, passes=1)


def hybrid(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["HybridProposer"](PromptLookup(), DraftModelProposer(draft))


MUTANTS: dict[str, tuple[Any, str, str]] = {
    "staged states the law of the guesser": (
        one_pass,
        "return tokens, verdict.accepted + 1, law",
        "law = torch.cat([guess.draft_probs, law[:, 1:]], dim=1)\n"
        "        return tokens, verdict.accepted + 1, law",
    ),
    "staged states the laws one place off": (
        one_pass,
        "return tokens, verdict.accepted + 1, law",
        "return tokens, verdict.accepted + 1, law.roll(1, dims=1)",
    ),
    "staged takes guesses untested": (one_pass, "accept_uniform=accept,", "accept_uniform=0,"),
    "staged draws guess and test with one number": (
        one_pass,
        "accept_uniform=accept,",
        "accept_uniform=own,",
    ),
    "staged draws test and next token with one number": (
        one_pass,
        "next_uniform=then[:, 0]",
        "next_uniform=accept[:, 0]",
    ),
    "staged tests guesses against another law": (
        one_pass,
        "draft_probs=guess.draft_probs,",
        "draft_probs=guess.draft_probs.flip(-1),",
    ),
    "staged proposes what no pass has drawn": (
        one_pass,
        "ends[:, -1].clamp(max=gamma)",
        "ends[:, -1].clamp(min=gamma)",
    ),
    "staged draws all passes with the same numbers": (
        staged,
        "self._pass(now, width, uniforms[i], end)",
        "self._pass(now, width, uniforms[0], end)",
    ),
    "staged does not move on between passes": (
        staged,
        "now = _after(now, new, kept, end)",
        "pass",
    ),
    "hybrid chooses by what the model draws": (
        hybrid,
        "is_guessed = guess.lengths > 0",
        "drawn = self.model.propose(view, gamma).tokens[:, 0]\n"
        "        is_guessed = (guess.lengths > 0) & (drawn == guess.tokens[:, 0])",
    ),
    "hybrid states the model's law of guesses": (
        hybrid,
        "proposal.draft_probs",
        "self.model.propose(view, gamma).draft_probs",
    ),
}


def joint_law(make: Any, names: dict[str, Any]) -> None:
    check_joint_law(measured(lambda draft: make(names, draft), Setting(gamma=2, tokens=3)))


@pytest.mark.parametrize("make", [staged, one_pass, hybrid])
def test_the_shipped_composites_have_the_joint_law(make: Any) -> None:
    joint_law(make, vars(composite))


@pytest.mark.parametrize(("make", "old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_a_broken_composite_breaks_the_joint_law(make: Any, old: str, new: str) -> None:
    with pytest.raises(LawBroken):
        joint_law(make, vars(mutate(composite, old, new)))


def test_a_model_that_reads_other_tokens_than_are_proposed_is_noticed() -> None:
    names = vars(
        mutate(
            composite, "return Proposal(proposal.tokens,", "return Proposal(proposal.tokens ^ 1,"
        )
    )
    seen = Seen()
    broken = names["HybridProposer"](
        PromptLookup(min_ngram=2), WatchedModel(random_adapter(8, 1), seen)
    )
    answers_of(broken, requests_of(4, WARM), slots=2)
    assert seen.stale > 0


def test_a_hybrid_that_does_not_catch_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "_catch_up", lambda *_: None)
    seen = Seen()
    answers_of(watched("hybrid", seen), requests_of(7, WARM), slots=1)
    assert seen.stale > 0


def test_numbers_that_later_rounds_draw_again_break_the_law_of_blocks() -> None:
    names = vars(mutate(composite, "replace(view, noise=lambda **_: own)", "view"))
    with pytest.raises(LawBroken):
        run(
            lambda draft: staged(names, draft),
            theory_checks.small_tables(),
            rows=20_000,
            verification="block",
        )
