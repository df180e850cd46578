"""Every deliberately broken rule is rejected by a named check that the shipped rule passes.

The checks are those that test_verification.py demands of the shipped rules over all settings; here
they prove their power.
"""

from collections.abc import Callable

import pytest

from draftkit.theory.verification import VERIFIERS, Verifier
from tests.theory import checks, mutants
from tests.theory.laws import LawBroken

# mutant of verification.py: (its rule, the check that must reject it)
REJECTED_BY: list[tuple[str, str, Callable[[Verifier], None]]] = [
    ("accepts at equality", "speculative", checks.check_accepts_nothing_impossible),
    ("inverted ratio", "speculative", checks.check_joint_law),
    ("correction drawn afresh from the target", "speculative", checks.check_joint_law),
    ("correction drawn afresh from the target", "speculative", checks.check_one_hot_law),
    ("correction drawn afresh from the target", "block", checks.check_joint_law),
    ("correction drawn afresh from the draft", "speculative", checks.check_joint_law),
    ("residual of absolute differences", "speculative", checks.check_joint_law),
    ("residual divides by zero", "speculative", checks.check_rounding),
    ("acceptance after a rejection", "speculative", checks.check_joint_law),
    ("bonus from the wrong position", "speculative", checks.check_joint_law),
    ("lengths ignored", "speculative", checks.check_ragged_law),
    ("lengths ignored", "block", checks.check_ragged_law),
    ("correction shares the noise of the tests", "speculative", checks.check_joint_law),
    ("block: test one context early", "block", checks.check_joint_law),
    ("block: test one likelihood early", "block", checks.check_joint_law),
    ("block: stops at the first failure", "block", checks.check_joint_law),
    ("block: likelihood not capped", "block", checks.check_joint_law),
    ("block: residual of the unscaled target", "block", checks.check_joint_law),
    ("acceptance after a rejection", "match", checks.check_joint_law),
    ("match: correction drawn afresh", "match", checks.check_joint_law),
    ("match: correction drawn afresh", "match", checks.check_one_hot_law),
    ("match: correction drawn afresh", "match", checks.check_ragged_law),
    ("match: compared with the position after", "match", checks.check_joint_law),
    ("match: next token from the position before", "match", checks.check_joint_law),
    ("match: every position from the same noise", "match", checks.check_joint_law),
]


@pytest.mark.parametrize(
    ("mutant", "rule", "check"),
    REJECTED_BY,
    ids=[f"{mutant}-{rule}-{check.__name__}" for mutant, rule, check in REJECTED_BY],
)
def test_a_broken_rule_fails_its_check(
    mutant: str, rule: str, check: Callable[[Verifier], None]
) -> None:
    broken = mutants.verification_mutant(mutant).VERIFIERS[rule]
    with pytest.raises(LawBroken):
        check(broken)


@pytest.mark.parametrize(
    "check", sorted({check for _, _, check in REJECTED_BY}, key=lambda check: check.__name__)
)
@pytest.mark.parametrize("rule", VERIFIERS)
def test_the_shipped_rule_passes_the_check_that_rejects_its_mutants(
    rule: str, check: Callable[[Verifier], None]
) -> None:
    check(VERIFIERS[rule])


def test_every_mutant_of_verification_has_a_check_that_rejects_it() -> None:
    assert {mutant for mutant, _, _ in REJECTED_BY} == set(mutants.VERIFICATION_EDITS)


@pytest.mark.parametrize("rule", checks.RATIO_RULES)
def test_being_told_raw_q_for_warped_proposals_breaks_the_joint_law(rule: str) -> None:
    with pytest.raises(LawBroken, match="joint law is off"):
        checks.check_told_law(VERIFIERS[rule])


def test_a_stale_edit_is_reported_instead_of_testing_the_shipped_code() -> None:
    with pytest.raises(AssertionError, match="0 places to mutate"):
        mutants.mutate(checks, "no such text anywhere" + " in it", "")
