"""Every deliberately broken decoder is rejected by a named check that the shipped one passes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.decoding.state import NoiseFunction
from draftkit.theory import noise
from tests.decoding import mutants
from tests.decoding.checks import (
    Parts,
    Setting,
    check_joint_law,
    check_proposal_law,
    check_sampled,
    check_swapped,
    check_text_alone,
    measured,
)
from tests.theory import checks as theory_checks
from tests.theory import mutants as theory_mutants
from tests.theory.laws import LawBroken

CUT = SamplingConfig(temperature=0.7, top_k=2)
PENALTY = SamplingConfig(repetition_penalty=1.5)
ROWS = 20_000


def with_rule(mutant: str, rule: str) -> Parts:
    return Parts(verifier=theory_mutants.verification_mutant(mutant).VERIFIERS[rule])


def joint_law(parts: Parts) -> None:
    check_joint_law(measured(parts, Setting(tokens=3)))


def joint_law_when_cut(parts: Parts) -> None:
    check_joint_law(measured(parts, Setting(tokens=3, samplings=(CUT,))))


def joint_law_under_a_penalty(parts: Parts) -> None:
    check_joint_law(measured(parts, Setting(tokens=3, samplings=(PENALTY,))))


def joint_law_of_mixed_rows(parts: Parts) -> None:
    samplings = (SamplingConfig(), SamplingConfig(temperature=0.0))
    check_joint_law(measured(parts, Setting(tokens=3, gamma=1, samplings=samplings)))


def joint_law_to_the_end_of_text(parts: Parts) -> None:
    check_joint_law(measured(parts, Setting(tokens=3, eos=(2,))))


def joint_law_of_one_hot_proposals(parts: Parts) -> None:
    check_joint_law(measured(replace(parts, proposer=mutants.PointingProposer), Setting(tokens=3)))


def joint_law_of_ragged_proposals(parts: Parts) -> None:
    check_joint_law(measured(replace(parts, proposer=mutants.CautiousProposer), Setting(tokens=3)))


def joint_law_of_blocks(parts: Parts) -> None:
    check_joint_law(measured(parts, Setting(tokens=3, verification="block")))


def text_alone(parts: Parts) -> None:
    check_text_alone(measured(parts, Setting(gamma=1)))


def text_alone_under_a_penalty(parts: Parts) -> None:
    check_text_alone(measured(parts, Setting(tokens=3, samplings=(PENALTY,))))


def proposal_law(parts: Parts) -> None:
    check_proposal_law(measured(parts, Setting(tokens=3)))


def proposal_law_under_a_penalty(parts: Parts) -> None:
    check_proposal_law(measured(parts, Setting(tokens=3, samplings=(PENALTY,))))


def swapped(parts: Parts) -> None:
    check_swapped(parts, Setting(tokens=3))


def sampled_when_cut(parts: Parts) -> None:
    check_sampled(parts, theory_checks.adversarial_tables(), rows=ROWS, sampling=CUT)


def sampled_with_few_tokens(parts: Parts) -> None:
    check_sampled(parts, theory_checks.small_tables(), rows=ROWS)


Check = Callable[[Parts], None]
REJECTED_BY: list[tuple[str, Check]] = [
    ("raw q told of warped proposals", joint_law_when_cut),
    ("raw q told of warped proposals", sampled_when_cut),
    ("proposals from the noise of the tests", joint_law),
    ("one uniform for all proposals", joint_law),
    ("draft feeds the last token alone", text_alone),
    ("draft positions shifted by one", proposal_law),
    ("penalty of proposals forgets proposals", proposal_law_under_a_penalty),
    ("target positions shifted by one", joint_law),
    ("target law unwarped", joint_law_when_cut),
    ("penalty of the target forgets proposals", joint_law_under_a_penalty),
    ("penalty sees what was rejected", text_alone_under_a_penalty),
    ("next token from the noise of the tests", joint_law),
    ("next token in the place after", joint_law),
    ("one rejected proposal committed", joint_law),
    ("number of proposals ignored", joint_law_of_ragged_proposals),
    ("prompt fed one slot late", joint_law),
    ("text goes on after its end", joint_law_to_the_end_of_text),
    ("a rejected end of text ends", joint_law_to_the_end_of_text),
    ("length limit ignored", joint_law),
    ("one greedy row makes all greedy", joint_law_of_mixed_rows),
    ("a greedy row beside sampled ones is sampled", joint_law_of_mixed_rows),
    ("sampling of the wrong rows", joint_law_of_mixed_rows),
    ("temperature in single precision", joint_law_when_cut),
    ("cache slots shifted by one", joint_law),
    ("cache of other rows", sampled_with_few_tokens),
]
# Rules that are broken below the decoder, seen through it.
BELOW: dict[str, tuple[Parts, Check]] = {
    "inverted ratio": (with_rule("inverted ratio", "speculative"), joint_law),
    "inverted ratio, sampled": (
        with_rule("inverted ratio", "speculative"),
        sampled_with_few_tokens,
    ),
    "no residual": (
        with_rule("correction drawn afresh from the target", "speculative"),
        joint_law,
    ),
    "no residual for one-hot proposals": (
        with_rule("correction drawn afresh from the target", "speculative"),
        joint_law_of_one_hot_proposals,
    ),
    "no residual of blocks": (
        with_rule("correction drawn afresh from the target", "block"),
        joint_law_of_blocks,
    ),
    "blocks stop at the first failure": (
        with_rule("block: stops at the first failure", "block"),
        joint_law_of_blocks,
    ),
    "q computed anew after a swap": (Parts(proposer=mutants.RecomputingProposer), swapped),
}
CHECKS = {check.__name__: check for _, check in [*REJECTED_BY, *BELOW.values()]}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_shipped_decoder_passes_every_check(check: Check) -> None:
    check(Parts())


@pytest.mark.parametrize(
    ("name", "check"), REJECTED_BY, ids=[f"{name}-{c.__name__}" for name, c in REJECTED_BY]
)
def test_a_broken_decoder_is_rejected(name: str, check: Check) -> None:
    with pytest.raises(LawBroken):
        check(mutants.mutant(name))


@pytest.mark.parametrize(("parts", "check"), BELOW.values(), ids=BELOW)
def test_a_broken_rule_is_rejected(parts: Parts, check: Check) -> None:
    with pytest.raises(LawBroken):
        check(parts)


def few_tokens(rule: str, noise_function: NoiseFunction = noise.uniform) -> None:
    """Over a few tokens, since in small cells reused noise shows."""
    tables = theory_checks.small_tables()
    check_sampled(Parts(noise=noise_function), tables, rows=ROWS, verification=rule)


BROKEN_NOISE: list[tuple[NoiseFunction, str]] = [
    (theory_mutants.tests_share_proposal_noise, "speculative"),
    (theory_mutants.tests_share_proposal_noise, "block"),
    (theory_mutants.correction_shares_proposal_noise, "speculative"),
    (theory_mutants.correction_shares_test_noise, "speculative"),
    (theory_mutants.correction_shares_test_noise, "block"),
    (theory_mutants.forgets_the_length, "speculative"),
    (theory_mutants.forgets_the_length, "block"),
    (theory_mutants.forgets_the_length, "match"),
    (theory_mutants.keyed_by_position, "block"),
]


@pytest.mark.parametrize(
    ("broken", "rule"), BROKEN_NOISE, ids=[f"{one.__name__}-{rule}" for one, rule in BROKEN_NOISE]
)
def test_shared_or_reused_noise_is_rejected(broken: NoiseFunction, rule: str) -> None:
    with pytest.raises(LawBroken, match="chi-square"):
        few_tokens(rule, broken)


@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
def test_the_shipped_noise_passes(rule: str) -> None:
    few_tokens(rule)


def test_noise_keyed_by_position_alone_leaves_plain_speculative_sampling_intact() -> None:
    """Why block verification needs the round in the key, and tests of the plain rule miss it."""
    few_tokens("speculative", theory_mutants.keyed_by_position)


def test_every_mutant_has_a_check_that_rejects_it() -> None:
    assert {name for name, _ in REJECTED_BY} == set(mutants.EDITS)


def test_q_computed_anew_is_exact_until_weights_are_swapped() -> None:
    """Why the check of swaps is needed: without one this mutant passes."""
    joint_law(Parts(proposer=mutants.RecomputingProposer))
