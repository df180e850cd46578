"""The losslessness check passes for the real decoder and fails for one that is not exact."""

import pytest

from draftkit.decoding import round as units
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.lossless import greedy_identity
from draftkit.theory.verification import Verification
from tests.tabular import TabularAdapter, random_adapter

VOCAB = 8
PROMPTS = [[token] for token in range(VOCAB)]


def table(seed):
    """A model whose next token hangs on the last two."""
    return TabularAdapter(random_adapter(VOCAB, seed).table)


def check(target, draft):
    found = greedy_identity(
        target,
        {"draft": DraftModelProposer(draft)},
        PROMPTS,
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
