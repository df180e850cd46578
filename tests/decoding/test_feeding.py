"""Encoder texts in the decoder: encoder-decoder pairs."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import Completion, decode
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from draftkit.models.adapter import Adapter
from tests import tiny
from tests.decoding.checks import VOCAB_SIZE, Parts, Setting, check_joint_law, measured
from tests.decoding.driving import request
from tests.tabular import EncodedAdapter, TabularAdapter, random_adapter, relative

TEXTS = tiny.prompts([5, 17, 1, 9, 12, 3, 8, 14], seed=3)
NEW_TOKENS = 24


def requests_of(gamma: int, *, temperature: float = 0.0) -> list[Request]:
    sampling = SamplingConfig(temperature=temperature)
    shared: dict[str, Any] = {"new": NEW_TOKENS, "gamma": gamma, "sampling": sampling, "seed": 4}
    return [request([*text, tiny.START], row=row, **shared) for row, text in enumerate(TEXTS)]


def answers(
    target: Adapter, draft: Adapter, gamma: int, batch_size: int, temperature: float = 0.0
) -> list[Completion]:
    return decode(
        target,
        requests_of(gamma, temperature=temperature),
        eos_token_ids=(),
        batch_size=batch_size,
        proposer=DraftModelProposer(draft) if gamma else None,
    )


@pytest.mark.parametrize(("kind", "batch_size"), [("t5", 3), ("t5 1.1", 8), ("mt5", 1)])
def test_greedy_answers_are_those_of_generate(kind: str, batch_size: int) -> None:
    target, draft = tiny.seq2seq_pair(kind)
    speculative = answers(target, draft, 4, batch_size)
    for text, answer in zip(TEXTS, speculative, strict=True):
        expected = target.model.generate(
            input_ids=torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        assert answer.output_ids == expected[0, 1:].tolist()
    accepted = sum(answer.accepted for answer in speculative)
    assert 0.1 < accepted / sum(answer.tested for answer in speculative) < 1


def test_sampled_rows_do_not_depend_on_the_batch_they_sit_in() -> None:
    target, draft = tiny.seq2seq_pair()
    alone = answers(target, draft, 3, 1, temperature=1.0)
    together = answers(target, draft, 3, 5, temperature=1.0)
    assert [a.output_ids for a in alone] == [a.output_ids for a in together]
    assert len({tuple(a.output_ids) for a in alone}) == len(alone)


def test_a_decoder_only_draft_has_nothing_to_read_the_text_with() -> None:
    target, _ = tiny.seq2seq_pair()
    with pytest.raises(ValueError, match="this model has no encoder"):
        answers(target, tiny.adapter("llama"), 3, 4)


@pytest.mark.parametrize("row", [[tiny.START], [3, 4, 5]], ids=["no text", "no start"])
def test_a_request_must_bring_what_its_target_reads(row: list[int]) -> None:
    target, _ = tiny.seq2seq_pair()
    decoder = Decoder(target, slots=1, capacity=64)
    request = Request(prompt_ids=row, max_new_tokens=4, sampling=SamplingConfig())
    with pytest.raises(ValueError, match="a row of an encoder-decoder model is a text, id 257 whi"):
        decoder.join([request])
    assert decoder.free_slots == 1


def test_an_answer_that_has_begun_goes_on() -> None:
    """As after an end of a process, or where sources mix token by token."""
    target, draft = tiny.seq2seq_pair()
    whole = answers(target, draft, 3, 4)
    begun = [
        replace(one, prompt_ids=[*one.prompt_ids, *done.output_ids[:7]], max_new_tokens=17)
        for one, done in zip(requests_of(3), whole, strict=True)
    ]
    rest = decode(target, begun, eos_token_ids=(), batch_size=4, proposer=DraftModelProposer(draft))
    assert [a.output_ids for a in rest] == [a.output_ids[7:] for a in whole]


class EncodedSetting(Setting):
    """Its prompt (1, 0) is the text that the encoder reads and the start of the decoder's."""

    @cached_property
    def target(self) -> TabularAdapter:
        return EncodedAdapter(random_adapter(VOCAB_SIZE, self.seed))

    def draft(self, seed: int = 100) -> TabularAdapter:
        return EncodedAdapter(relative(self.target, self.seed + seed))


def test_the_joint_law_behind_an_encoder_is_the_targets() -> None:
    """By enumeration, of an encoder-decoder pair of tables."""
    check_joint_law(measured(Parts(), EncodedSetting(verification="block")))
