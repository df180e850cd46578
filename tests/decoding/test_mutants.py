"""Every deliberately broken decoder is rejected by the check that the shipped one passes."""

import pytest

from draftkit.decoding.state import NoiseFunction
from tests.decoding.checks import Parts, Setting, check_law, check_sampled, check_swapped
from tests.decoding.mutants import EDITS, Edit, RecomputingProposer, mutant, parts_of
from tests.theory import mutants as theory_mutants
from tests.theory.checks import small_tables
from tests.theory.laws import LawBroken

PASSED = {
    f"{edit.make.__name__}-{edit.setting.gamma}-{edit.setting.tokens}": edit
    for edit in EDITS.values()
}


@pytest.mark.parametrize("edit", PASSED.values(), ids=PASSED)
def test_the_shipped_decoder_passes_in_the_same_settings(edit: Edit) -> None:
    check_law(parts_of(edit.make), edit.setting)


@pytest.mark.parametrize("name", EDITS)
def test_a_broken_decoder_is_rejected(name: str) -> None:
    with pytest.raises(LawBroken):
        check_law(mutant(name), EDITS[name].setting)


def test_a_broken_proposer_that_computes_q_anew_is_rejected_after_a_swap() -> None:
    """Without one it is exact."""
    with pytest.raises(LawBroken):
        check_swapped(Parts(proposer=RecomputingProposer), Setting())


# Over a few tokens, since in small cells reused noise shows.
BROKEN_NOISE: list[tuple[NoiseFunction, str]] = [
    (theory_mutants.tests_share_proposal_noise, "speculative"),
    (theory_mutants.correction_shares_proposal_noise, "speculative"),
    (theory_mutants.correction_shares_test_noise, "block"),
    (theory_mutants.forgets_the_length, "speculative"),
    (theory_mutants.forgets_the_length, "match"),
    (theory_mutants.keyed_by_position, "block"),
]


@pytest.mark.parametrize(
    ("broken", "rule"), BROKEN_NOISE, ids=[f"{one.__name__}-{rule}" for one, rule in BROKEN_NOISE]
)
def test_shared_or_reused_noise_is_rejected(broken: NoiseFunction, rule: str) -> None:
    with pytest.raises(LawBroken, match="chi-square"):
        check_sampled(Parts(noise=broken), small_tables(), rows=20_000, verification=rule)
