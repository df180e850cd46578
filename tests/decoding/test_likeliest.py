"""The target's likeliest ids of every round are those of a fresh forward pass over the text."""

import pytest
import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.results import RoundResult
from tests import tiny
from tests.decoding.driving import DRAFT, SAMPLINGS, drive, request, strict_compiler
from tests.tabular import TabularAdapter, random_adapter, relative

K = 5
Rows = list[tuple[Tensor, Tensor, Tensor]]  # a request: ids, log-probabilities, tails of its text


class Listening(Decoder):
    """A decoder whose results are kept by request: join all at once, in the order of slots."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyrefly: ignore
        self.kept: dict[int, Rows] = {}

    def round(self) -> list[RoundResult]:
        results = super().round()
        for result in results:
            assert result.topk_ids is not None
            assert result.topk_log_probs is not None
            assert result.tail_mass is not None
            parts = (result.topk_ids, result.topk_log_probs, result.tail_mass)
            for row, (slot, count) in enumerate(zip(result.slots, result.committed, strict=True)):
                own = tuple(part[row, :count] for part in parts)
                self.kept.setdefault(slot, []).append(own)  # pyrefly: ignore
        return results


def joined(rows: Rows) -> tuple[Tensor, ...]:
    return tuple(torch.cat(part) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("late", [False, True])
def test_ids_log_probabilities_and_tails_are_those_of_a_fresh_pass(late: bool) -> None:
    target, draft = tiny.pair()
    decoder = Listening(target, slots=4, capacity=64, late=late, top_k=K)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    prompts = tiny.prompts([3, 9, 1, 14])
    requests = [
        request(prompt, new=9 + row, row=row, sampling=SAMPLINGS[row], gamma=2 + row % 2)
        for row, prompt in enumerate(prompts)
    ]
    answers = drive(decoder, requests)
    for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids, log_probs, tails = joined(decoder.kept[slot])
        text = torch.tensor([prompt + answer.text])
        keep = torch.zeros_like(text, dtype=torch.bool)
        keep[:, len(prompt) - 1 : -1] = True
        with torch.no_grad():
            logits = target.score(text, keep).double()
        expected = logits.log_softmax(-1).topk(K)
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(log_probs.double(), expected.values, atol=1e-4, rtol=0)
        temperature = SAMPLINGS[slot].temperature
        kept = (logits / (temperature or 1)).softmax(-1).gather(-1, ids).sum(-1)
        torch.testing.assert_close(tails.double(), 1 - kept, atol=1e-5, rtol=0)
        assert tails.max() > 0.01  # there is something to tell


def play(target: TabularAdapter, top_k: int, *, compiled: bool) -> dict[int, Rows]:
    decoder = Listening(target, slots=1, capacity=32, compiled=compiled, top_k=top_k)
    decoder.attach(DRAFT, DraftModelProposer(relative(target, 2)))
    drive(decoder, [request([1, 2], new=6)])
    return decoder.kept


def test_compiled_rounds_name_the_same_ids_and_each_count_is_code_of_its_own() -> None:
    target = random_adapter(8, 5)
    with strict_compiler() as strict:
        for top_k in (3, 2):
            before = strict.made
            found = play(target, top_k, compiled=True)
            assert strict.made > before
            for slot, rows in play(target, top_k, compiled=False).items():
                for ours, theirs in zip(joined(found[slot]), joined(rows), strict=True):
                    assert ours.shape[1:] in ((top_k,), ())
                    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_no_more_ids_are_named_than_leave_a_rest() -> None:
    target = random_adapter(8, 5)
    ids, _, tails = joined(play(target, 99, compiled=False)[0])
    assert ids.shape[1] == 7
    assert (tails > 0).all()


def test_without_asking_none_are_named() -> None:
    decoder = Decoder(random_adapter(8, 5), slots=1, capacity=32)
    decoder.join([request([1], gamma=0)])
    (result,) = decoder.round()
    assert result.topk_ids is None
    assert result.topk_log_probs is None
    assert result.tail_mass is None
