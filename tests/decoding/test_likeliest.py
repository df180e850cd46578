"""The target's likeliest ids of every round are those of a fresh forward pass over the text."""

import pytest
import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import LIKELIEST, finish
from draftkit.decoding.proposers import DraftModelProposer
from tests import tiny
from tests.decoding.driving import DRAFT, SAMPLINGS, request, strict_compiler
from tests.tabular import random_adapter

K = 5


@pytest.mark.parametrize("late", [False, True])
def test_ids_log_probabilities_and_tails_are_those_of_a_fresh_pass(late: bool) -> None:
    target, draft = tiny.pair()
    decoder = Decoder(target, slots=4, capacity=64, late=late, top_k=K)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    prompts = tiny.prompts([3, 9, 1, 14])
    requests = [
        request(prompt, new=9 + row, row=row, sampling=SAMPLINGS[row], gamma=2 + row % 2)
        for row, prompt in enumerate(prompts)
    ]
    for prompt, sampling, answer in zip(prompts, SAMPLINGS, finish(decoder, requests), strict=True):
        ids, log_probs, tails = (torch.tensor(getattr(answer, name)) for name in LIKELIEST)
        text = torch.tensor([prompt + answer.output_ids])
        keep = torch.zeros_like(text, dtype=torch.bool)
        keep[:, len(prompt) - 1 : -1] = True
        with torch.no_grad():
            logits = target.score(text, keep).double()
        expected = logits.log_softmax(-1).topk(K)
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(log_probs.double(), expected.values, atol=1e-4, rtol=0)
        kept = (logits / (sampling.temperature or 1)).softmax(-1).gather(-1, ids).sum(-1)
        torch.testing.assert_close(tails.double(), 1 - kept, atol=1e-5, rtol=0)
        assert tails.max() > 0.01  # there is something to tell


def play(top_k: int, *, compiled: bool = False) -> list[Tensor]:
    decoder = Decoder(random_adapter(8, 5), slots=1, capacity=32, compiled=compiled, top_k=top_k)
    (answer,) = finish(decoder, [request([1, 2], new=6, gamma=0)])
    return [torch.tensor(getattr(answer, name)) for name in LIKELIEST]


def test_compiled_rounds_name_the_same_ids_and_each_count_is_code_of_its_own() -> None:
    with strict_compiler() as strict:
        for made, top_k in enumerate((3, 2), start=1):
            ours = play(top_k, compiled=True)
            assert strict.made == made
            torch.testing.assert_close(ours, play(top_k), atol=1e-12, rtol=1e-12)
            assert ours[0].shape == (6, top_k)


def test_no_more_ids_are_named_than_leave_a_rest() -> None:
    ids, _, tails = play(99)
    assert ids.shape[1] == 7
    assert (tails > 0).all()


def test_without_asking_none_are_named() -> None:
    assert [len(part) for part in play(0)] == [0, 0, 0]
