"""The losslessness check passes for the real decoder and fails for one that is not exact."""

import pytest
import torch

from draftkit.decoding import decoder as decoder_module
from draftkit.evaluation.lossless import greedy_identity
from draftkit.theory.verification import Verification
from tests.distillation.bigram import Bigram

PROMPTS = [[token] for token in range(8)]


def check(target, draft):
    return greedy_identity(
        target, draft, PROMPTS, max_new_tokens=12, gamma=3, batch_size=3, eos_token_ids=()
    )


def test_a_draft_of_any_quality_passes():
    for seed in (0, 1, 2):
        found = check(Bigram(0), Bigram(seed))
        assert found.passed
        assert (found.compared, found.mismatches) == (8, 0)


def accept_everything(*, target_probs, draft_tokens, lengths):
    return Verification(lengths, target_probs[:, -1].argmax(-1))


def test_a_decoder_that_accepts_everything_is_caught(monkeypatch):
    monkeypatch.setattr(decoder_module, "greedy_verification", accept_everything)
    found = check(Bigram(0), Bigram(1))
    assert not found.passed
    assert found.mismatches > 0
    assert found.as_dict()["passed"] is False
    assert found.as_dict()["statistic"] == found.mismatches


@pytest.mark.parametrize(("gap", "tolerated"), [(1e-7, True), (1e-3, False)])
def test_a_mismatch_is_tolerated_only_where_the_two_best_logits_nearly_tie(
    monkeypatch, gap, tolerated
):
    target = Bigram(0)
    with torch.no_grad():
        best = target.table.amax(-1, keepdim=True)
        target.table[:, 3:4] = best + 1
        target.table[:, 5:6] = best + 1 + gap
    draft = Bigram(1)
    with torch.no_grad():
        draft.table[:, 3] = 50  # always proposes the second best
    monkeypatch.setattr(decoder_module, "greedy_verification", accept_everything)
    found = check(target, draft)
    assert found.mismatches == 8
    assert found.near_ties == (8 if tolerated else 0)
    assert found.passed is tolerated
