"""The losslessness check passes for the real decoder and fails for one that is not exact."""

import pytest
import torch

from draftkit.decoding import round as units
from draftkit.decoding.generation import Completion
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.lossless import NOT_CHECKED, differ_by_rounding, greedy_identity
from draftkit.theory.verification import Verification, greedy_verification
from tests import tiny
from tests.tabular import TabularAdapter, random_adapter

VOCAB = 8
PROMPTS = [[token] for token in range(VOCAB)]


def table(seed):
    """A model whose next token hangs on the last two."""
    return TabularAdapter(random_adapter(VOCAB, seed).table)


def check(target, draft, prompts=PROMPTS):
    found = greedy_identity(
        target,
        {"draft": DraftModelProposer(draft)},
        prompts,
        max_new_tokens=12,
        gamma=3,
        batch_size=3,
        eos_token_ids=(),
    )
    return found["draft"]


def test_a_draft_of_any_quality_passes():
    for seed in (0, 1, 2):
        found = check(table(0), table(seed))
        assert found.passed
        assert (found.compared, found.mismatches) == (8, 0)


def accept_everything(*, target_probs, draft_tokens, lengths):
    return Verification(lengths, target_probs[:, -1].argmax(-1))


def test_a_decoder_that_accepts_everything_is_caught(monkeypatch):
    monkeypatch.setattr(units, "greedy_verification", accept_everything)
    found = check(table(0), table(1))
    assert not found.passed
    assert found.mismatches > 0
    assert found.as_dict()["passed"] is False
    assert found.as_dict()["statistic"] == found.mismatches


@pytest.mark.parametrize(("gap", "tolerated"), [(1e-7, True), (1e-3, False)])
def test_a_mismatch_is_tolerated_only_where_the_two_best_logits_nearly_tie(
    monkeypatch, gap, tolerated
):
    target = table(0)
    best = target.table.amax(-1)
    target.table[..., 3] = best + 1
    target.table[..., 5] = best + 1 + gap
    draft = table(1)
    draft.table[..., 3] = 50  # always proposes the second best
    monkeypatch.setattr(units, "greedy_verification", accept_everything)
    found = check(target, draft)
    assert found.mismatches == 8
    assert found.near_ties == (8 if tolerated else 0)
    assert found.passed is tolerated


HALF_PROMPTS = tiny.prompts([5, 9, 12, 7] * 4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_in_the_served_dtype_near_ties_are_no_fault_and_a_wrong_decoder_is(
    monkeypatch, architecture
):
    target, draft = tiny.pair(architecture, dtype=torch.bfloat16)
    right = check(target, draft, HALF_PROMPTS)
    assert right.passed
    assert right.as_dict()["method"] == "greedy identity in bfloat16"
    monkeypatch.setattr(units, "greedy_verification", accept_everything)
    wrong = check(target, draft, HALF_PROMPTS)
    assert not wrong.passed
    assert wrong.mismatches > wrong.near_ties


def accept_one_too_many(*, target_probs, draft_tokens, lengths):
    right = greedy_verification(
        target_probs=target_probs, draft_tokens=draft_tokens, lengths=lengths
    )
    accepted = (right.accepted + 1).minimum(lengths)
    return Verification(accepted, target_probs[range(len(accepted)), accepted].argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoder_that_accepts_one_proposal_too_many_is_caught(monkeypatch, dtype):
    target, draft = tiny.pair(dtype=dtype)
    assert check(target, draft, HALF_PROMPTS).passed
    monkeypatch.setattr(units, "greedy_verification", accept_one_too_many)
    assert not check(target, draft, HALF_PROMPTS).passed


def test_what_follows_a_near_tie_must_be_the_best_as_well():
    target = table(0)
    best = target.table.amax(-1)
    target.table[..., 3] = best + 1
    target.table[..., 5] = best + 1 + 1e-7

    def answer(*ids):
        return Completion([0], list(ids))

    plain = answer(5, 5, 5, 5)
    assert differ_by_rounding(target, plain, answer(5, 3, 5, 3))
    assert differ_by_rounding(target, answer(3, 3, 3, 3), answer(5, 5, 5, 5))
    assert not differ_by_rounding(target, plain, answer(5, 3, 1, 5))
    assert not differ_by_rounding(target, answer(5, 1, 5, 5), answer(5, 3, 5, 5))


def test_an_answer_that_ends_early_is_no_near_tie():
    assert not differ_by_rounding(table(0), Completion([0], [1, 2, 3]), Completion([0], [1, 2]))


def test_what_was_not_checked_is_neither_right_nor_wrong():
    assert NOT_CHECKED.as_dict() == {
        "method": "not checked",
        "statistic": None,
        "p_value": None,
        "passed": None,
        "compared": 0,
        "near_ties": 0,
    }
