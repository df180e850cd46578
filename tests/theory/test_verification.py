"""Verification keeps the target's law, by exact enumeration.

The counterpart is test_mutants.py, where broken rules must fail these checks. With real noise the
rules are judged in the decoder (`tests/decoding/test_exactness.py`).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftkit.theory import noise
from draftkit.theory.acceptance import (
    exact_match_acceptance,
    greedy_draft_acceptance,
    sampled_acceptance,
)
from draftkit.theory.verification import (
    VERIFIERS,
    Verification,
    Verifier,
    greedy_verification,
)
from tests.theory import checks
from tests.theory.laws import (
    check_round,
    conditionals,
    markov,
    measure_round,
    sequences,
)

rules = pytest.mark.parametrize("rule", VERIFIERS)


def as_verifier(**inputs: Tensor | None) -> Verification:
    """greedy_verification behind the face of the exact rules: it has no use for noise or q."""
    return greedy_verification(
        target_probs=inputs["target_probs"],
        draft_tokens=inputs["draft_tokens"],
        lengths=inputs["lengths"],
    )


# Exact enumeration


@pytest.mark.parametrize("warp", checks.WARPS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
@rules
def test_a_round_continued_by_the_target_has_exactly_the_targets_joint_law(
    rule: str, gamma: int, warp: str
) -> None:
    target, draft = checks.laws_of(warp, seed=5)  # the checks of test_mutants.py take another
    check_round(VERIFIERS[rule], target=target, draft=draft, vocab_size=5, gamma=gamma)


@pytest.mark.soak
@pytest.mark.parametrize("warp", checks.WARPS)
@rules
def test_the_joint_law_holds_over_many_random_tables(rule: str, warp: str) -> None:
    for seed in range(100, 140):
        target, draft = checks.laws_of(warp, seed)
        check_round(VERIFIERS[rule], target=target, draft=draft, vocab_size=5, gamma=3)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("warp", ["greedy target", "greedy both"])
def test_greedy_verification_commits_exactly_the_greedy_targets_tokens(
    gamma: int, warp: str
) -> None:
    for seed in (4, 5, 10, 11):  # "greedy both" accepts 0, 3, 2 and 1 of 3 proposals
        target, draft = checks.laws_of(warp, seed)
        for lengths in (None, checks.stops_after_token_one):
            check_round(
                as_verifier,
                target=target,
                draft=draft,
                vocab_size=5,
                gamma=gamma,
                lengths=lengths,
            )


@pytest.mark.parametrize("is_sampled", [False, True])
@rules
def test_at_temperature_zero_every_rule_is_greedy_verification(rule: str, is_sampled: bool) -> None:
    target, draft = checks.laws_of("greedy target")
    blocks = sequences(5, 3)
    target_probs = conditionals(target, blocks)
    generator = torch.Generator().manual_seed(0)
    exact = VERIFIERS[rule](
        target_probs=target_probs,
        draft_probs=conditionals(draft, blocks)[:, :3] if is_sampled else None,
        draft_tokens=blocks,
        lengths=None,
        accept_uniform=torch.rand(125, 3, generator=generator, dtype=torch.float64),
        next_uniform=torch.rand(125, generator=generator, dtype=torch.float64),
    )
    greedy = greedy_verification(target_probs=target_probs, draft_tokens=blocks, lengths=None)
    assert torch.equal(exact.accepted, greedy.accepted)
    assert torch.equal(exact.next_token, greedy.next_token)
    assert greedy.accepted.unique().tolist() == [0, 1, 2, 3]


# How many proposals are kept


# rule, whether the draft proposes its argmax, the probability of a proposal's acceptance
MODES = [
    ("speculative", False, sampled_acceptance),
    ("speculative", True, greedy_draft_acceptance),
    ("block", False, sampled_acceptance),
    ("block", True, greedy_draft_acceptance),
    ("match", False, exact_match_acceptance),
    ("match", True, greedy_draft_acceptance),
]


@pytest.mark.parametrize("warp", ["full support", "top-p", "only the draft cut"])
@pytest.mark.parametrize(("rule", "is_argmax", "acceptance"), MODES)
def test_a_proposal_is_accepted_with_exactly_the_probability_of_its_mode(
    rule: str, is_argmax: bool, acceptance: Callable[..., Tensor], warp: str
) -> None:
    root = torch.zeros(1, 0, dtype=torch.int64)
    for seed in (5, 22, 40):
        target, draft = checks.laws_of(warp, seed)
        measured = measure_round(
            VERIFIERS[rule],
            target=target,
            draft=checks.argmax_of(draft) if is_argmax else draft,
            vocab_size=5,
            gamma=1,
            one_hot=is_argmax,
        )
        exact = acceptance(
            target_probs=conditionals(target, root), draft_probs=conditionals(draft, root)
        )
        assert measured.expected_accepted() == pytest.approx(exact.item(), abs=1e-12)


def test_the_example_of_block_verification_accepts_eleven_ninths_against_ten_ninths() -> None:
    # arXiv 2403.10444, section 3: two tokens, gamma 2, the same laws in every context.
    target = markov(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(2, 2, 2))
    draft = markov(torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).expand(2, 2, 2))
    found = {
        rule: check_round(
            verify, target=target, draft=draft, vocab_size=2, gamma=2
        ).expected_accepted()
        for rule, verify in VERIFIERS.items()
    }
    assert found["speculative"] == pytest.approx(10 / 9, abs=1e-12)
    assert found["block"] == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("warp", ["full support", "top-p", "only the draft cut"])
def test_block_verification_never_accepts_fewer_than_speculative_sampling(warp: str) -> None:
    gains = []
    for seed in range(22, 26):
        target, draft = checks.laws_of(warp, seed)
        expected = {
            rule: measure_round(
                VERIFIERS[rule], target=target, draft=draft, vocab_size=5, gamma=3
            ).expected_accepted()
            for rule in checks.RATIO_RULES
        }
        gains.append(expected["block"] - expected["speculative"])
    assert min(gains) > -1e-12
    assert max(gains) > 0.005


# Edges


@pytest.mark.parametrize("rule", checks.RATIO_RULES)
def test_equal_laws_accept_everything_and_an_empty_residual_falls_back_to_the_target(
    rule: str,
) -> None:
    checks.check_equal_laws(VERIFIERS[rule])


def same(first: Verification, second: Verification) -> bool:
    return torch.equal(first.accepted, second.accepted) and torch.equal(
        first.next_token, second.next_token
    )


def test_exact_match_commits_the_targets_own_samples_up_to_the_first_that_differs() -> None:
    inputs = checks.inputs_of(gamma=3)
    uniform = torch.cat([inputs["accept_uniform"], inputs["next_uniform"][:, None]], dim=1)
    samples = noise.sample(probs=inputs["target_probs"].flatten(0, 1), uniform=uniform.flatten())
    samples = samples.view(64, 4)
    wrong = (torch.arange(64) % 4)[:, None]  # 3: nowhere
    tokens = torch.where(torch.arange(3) == wrong, (samples[:, :3] + 1) % 6, samples[:, :3])
    result = VERIFIERS["match"](**inputs | {"draft_tokens": tokens})
    assert torch.equal(result.accepted, torch.minimum(wrong[:, 0], inputs["lengths"]))
    assert torch.equal(result.next_token, samples.gather(1, result.accepted[:, None])[:, 0])


@rules
def test_gamma_zero_samples_the_target(rule: str) -> None:
    inputs = checks.inputs_of(gamma=0)
    result = VERIFIERS[rule](**inputs)
    target_probs, next_uniform = inputs["target_probs"], inputs["next_uniform"]
    assert target_probs is not None
    assert next_uniform is not None
    assert result.accepted.tolist() == [0] * 64
    expected = noise.sample(probs=target_probs[:, 0], uniform=next_uniform)
    assert torch.equal(result.next_token, expected)


@rules
def test_a_missing_draft_law_means_one_hot_and_missing_lengths_mean_all(rule: str) -> None:
    inputs = checks.inputs_of(gamma=3)
    tokens = inputs["draft_tokens"]
    assert tokens is not None
    one_hot = torch.nn.functional.one_hot(tokens, 6).double()
    without = VERIFIERS[rule](**inputs | {"draft_probs": None, "lengths": None})
    spelled = {"draft_probs": one_hot, "lengths": torch.full((64,), 3)}
    assert same(without, VERIFIERS[rule](**inputs | spelled))


@rules
def test_what_lies_beyond_the_proposals_of_a_row_is_never_read(rule: str) -> None:
    inputs = checks.inputs_of(gamma=4)
    lengths = inputs["lengths"]
    assert lengths is not None
    beyond = torch.arange(4) >= lengths[:, None]
    # The bonus token of exact match has the noise of its own position.
    unread = torch.arange(4) >= lengths[:, None] + (rule == "match")
    garbage = {
        "draft_probs": inputs["draft_probs"].masked_fill(beyond[..., None], torch.nan),
        "draft_tokens": inputs["draft_tokens"].masked_fill(beyond, 5),
        "accept_uniform": inputs["accept_uniform"].masked_fill(unread, 0.0),
        "target_probs": inputs["target_probs"].masked_fill(
            (torch.arange(5) > lengths[:, None])[..., None], torch.nan
        ),
    }
    assert same(VERIFIERS[rule](**inputs), VERIFIERS[rule](**inputs | garbage))
    assert (VERIFIERS[rule](**inputs).accepted <= lengths).all()


@rules
def test_a_row_does_not_depend_on_the_batch_it_sits_in(rule: str) -> None:
    inputs = checks.inputs_of(gamma=3)
    together = VERIFIERS[rule](**inputs)
    for row in range(0, 64, 9):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        result = VERIFIERS[rule](**alone)
        assert result.accepted.item() == together.accepted[row].item()
        assert result.next_token.item() == together.next_token[row].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@rules
def test_half_precision_probabilities_are_raised_to_float32(rule: str, dtype: torch.dtype) -> None:
    inputs = checks.inputs_of(gamma=3, dtype=dtype)
    raised = {name: inputs[name].float() for name in ("target_probs", "draft_probs")}
    assert same(VERIFIERS[rule](**inputs), VERIFIERS[rule](**inputs | raised))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("gamma", [0, 4])
@rules
def test_verification_compiles_without_a_break(rule: str, gamma: int, one_hot: bool) -> None:
    inputs = checks.inputs_of(gamma) | ({"draft_probs": None} if one_hot else {})
    verify: Verifier = torch.compile(VERIFIERS[rule], backend="eager", fullgraph=True)
    assert same(verify(**inputs), VERIFIERS[rule](**inputs))


def test_greedy_verification_compiles_without_a_break() -> None:
    inputs = checks.inputs_of(gamma=4)
    inputs = {name: inputs[name] for name in ("target_probs", "draft_tokens", "lengths")}
    verify = torch.compile(greedy_verification, backend="eager", fullgraph=True)
    assert same(verify(**inputs), greedy_verification(**inputs))
