"""Cached logits equal those of a fresh forward pass, after every round, whatever joins or leaves.

The models are wrapped to record what they returned through the cache; the texts are kept here, and
every recorded logit is compared with the bare model on the bare text.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.decoding import decoder as decoder_module
from draftkit.decoding.decoder import Decoder, RoundResult
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from draftkit.models import cache as cache_module
from draftkit.models.adapter import CausalAdapter
from draftkit.models.cache import BUCKET
from tests import tiny
from tests.decoding.driving import request

ATOL = 1e-5  # models compute norms and rotations in float32


class Watched(CausalAdapter):
    """An adapter that remembers the logits of every step."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, vocab_size=tiny.VOCAB_SIZE)
        self.steps: list[Tensor] = []

    def step(self, tokens: Tensor, *, positions: Tensor, cache: Any, last: int = 0) -> Tensor:
        logits = super().step(tokens, positions=positions, cache=cache, last=last)
        self.steps.append(logits)
        return logits

    def fresh(self, text: list[int], last: int) -> Tensor:
        """The logits [last, V] after the last tokens of `text`, by the bare model."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -last:]


class Session:
    """A decoder with two drafts, driven row by row, and every logit of it checked."""

    def __init__(self, architecture: str, slots: int = 6) -> None:
        model = tiny.model(architecture, dtype=torch.float64)
        self.target = Watched(model)
        self.drafts = {
            "close": Watched(tiny.related(model, noise=0.08)),
            "far": Watched(tiny.related(model, noise=0.3)),
        }
        self.decoder = Decoder(self.target, slots=slots, capacity=tiny.MAX_POSITIONS)
        for name, draft in self.drafts.items():
            self.decoder.attach(name, DraftModelProposer(draft))
        self.texts: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.accepted: set[tuple[int, int]] = set()  # (gamma, number accepted) that occurred
        self.compared = 0

    def join(self, length: int, *, gamma: int, draft: str | None = None, new: int = 12) -> int:
        (prompt,) = tiny.prompts([length], seed=length)
        one = request(prompt, new=new, gamma=gamma, proposer_id=draft, row=length)
        (slot,) = self.decoder.join([one])
        self.texts[slot], self.requests[slot] = [*prompt], one
        return slot

    def leave(self, slots: list[int]) -> None:
        self.decoder.leave(slots)
        for slot in slots:
            del self.texts[slot], self.requests[slot]

    def round(self) -> list[int]:
        """One round; returns the slots that are done."""
        for model in (self.target, *self.drafts.values()):
            model.steps.clear()
        done = []
        for result in self.decoder.round():
            self._check(result)
            for row, slot in enumerate(result.slots):
                self.texts[slot] += result.tokens[row, : result.committed[row]].tolist()
                self.accepted.add((result.gamma, result.emitted[row] - 1))
                if result.done[row]:
                    done.append(slot)
        return done

    def _check(self, result: RoundResult) -> None:
        """Compare the target's pass and the draft's steps of one group with fresh passes."""
        gamma = result.gamma
        (target_logits, *self.target.steps) = self.target.steps
        name = self.requests[result.slots[0]].proposer_id
        draft = self.drafts[name] if name is not None and gamma else None
        steps = draft.steps[:gamma] if draft is not None else []
        if draft is not None:
            del draft.steps[:gamma]
        for row, slot in enumerate(result.slots):
            proposals = result.draft_tokens[row].tolist()
            text = self.texts[slot] + proposals
            expected = self.target.fresh(text, gamma + 1)
            torch.testing.assert_close(target_logits[row], expected, atol=ATOL, rtol=0)
            self.compared += gamma + 1
            if draft is not None:
                expected = draft.fresh(text[:-1], gamma)
                found = torch.stack([logits[row, -1] for logits in steps])
                torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
                self.compared += gamma


def play(session: Session) -> None:
    """Rows of all gammas and both drafts join and leave between rounds."""
    session.join(9, gamma=2, draft="close")
    session.join(1, gamma=0)
    session.round()
    session.join(14, gamma=3, draft="far", new=20)
    early = session.join(6, gamma=2, draft="close", new=30)
    for _ in range(3):
        session.leave(session.round())
    session.leave([early])  # unfinished; its slot goes to a shorter text, over its traces
    session.join(3, gamma=1, draft="far")
    session.join(30, gamma=3, draft="close", new=40)
    session.leave(session.round())  # the next prompt starts while that one is on its way
    session.join(21, gamma=3, draft="close", new=40)
    while session.texts:
        session.leave(session.round())


@pytest.mark.parametrize(
    ("architecture", "chunk", "bucket"),
    [("llama", 512, BUCKET), ("mistral", 4, 1), ("gpt2", 512, BUCKET), ("gemma3", 4, 1)],
)
def test_after_every_round_cached_logits_equal_a_fresh_pass(
    architecture: str, chunk: int, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(cache_module, "BUCKET", bucket)  # 1: no slot more than asked for
    session = Session(architecture)
    play(session)
    assert session.compared > 150
    assert {(3, n) for n in range(4)} <= session.accepted  # full acceptance and every rejection
    assert session.decoder.free_slots == 6


def test_rows_wait_for_their_prompt_while_others_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL_CHUNK", 4)
    session = Session("llama")
    short = session.join(2, gamma=1, draft="close", new=20)
    long = session.join(14, gamma=1, draft="close", new=20)
    advanced = []
    for _ in range(5):
        before = {slot: len(text) for slot, text in session.texts.items()}
        session.round()
        advanced.append({s for s, text in session.texts.items() if len(text) > before[s]})
    # 13 tokens of the long prompt go in by four chunks of 4.
    assert advanced == [{short}, {short}, {short}, {short, long}, {short, long}]


def test_prefill_says_whether_any_prompt_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "PREFILL_CHUNK", 4)
    session = Session("llama")
    assert session.decoder.prefill() is False
    session.join(1, gamma=0)
    assert session.decoder.prefill() is False  # its only token is fed by its first round
    session.join(10, gamma=2, draft="far")
    assert [session.decoder.prefill() for _ in range(4)] == [True, True, False, False]


def test_new_weights_are_met_by_old_caches_and_a_fresh_row_gets_a_fresh_one() -> None:
    session = Session("llama")
    session.join(9, gamma=2, draft="close", new=40)
    session.round()
    state = session.drafts["far"].model.state_dict()
    session.decoder.swap("close", {k: v.clone() for k, v in state.items()}, "v2")
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        session.round()  # the draft's old cache: its logits are those of neither draft
    session.leave(list(session.texts))
    session.join(9, gamma=2, draft="close")
    session.round()
