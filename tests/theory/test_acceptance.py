"""Acceptance in its three modes, and counted quantities by hand."""

import pytest
import torch
from torch import Tensor

from draftkit.theory.acceptance import (
    chain_acceptance,
    exact_match_acceptance,
    exact_match_share,
    greedy_draft_acceptance,
    greedy_draft_share,
    rounds_of_texts,
    sampled_acceptance,
    sampled_share,
)
from draftkit.theory.speedup import expected_tokens
from draftkit.theory.verification import VERIFIERS
from tests.theory.laws import measure_round

# The three modes


def test_the_three_modes_of_a_small_pair_are_computed_by_hand() -> None:
    pair = {
        "target_probs": torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.9, 0.0]]),
        "draft_probs": torch.tensor([[0.2, 0.7, 0.1], [0.0, 1.0, 0.0]]),
    }
    torch.testing.assert_close(sampled_acceptance(**pair), torch.tensor([0.6, 0.9]))
    torch.testing.assert_close(greedy_draft_acceptance(**pair), torch.tensor([0.3, 0.9]))
    torch.testing.assert_close(exact_match_acceptance(**pair), torch.tensor([0.33, 0.9]))


@pytest.mark.parametrize(
    "mode", [sampled_acceptance, greedy_draft_acceptance, exact_match_acceptance]
)
def test_modes_compute_in_float32_at_least(mode: object) -> None:
    assert callable(mode)
    probs = torch.rand(3, 9, generator=torch.Generator().manual_seed(0))
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        pair = {"target_probs": probs.to(dtype), "draft_probs": probs.flip(-1).to(dtype)}
        assert mode(**pair).dtype == expected


# Rounds by text

VOCAB, LENGTH = 3, 5
SHARES = {"sampled": sampled_share, "argmax": greedy_draft_share, "match": exact_match_share}


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """p and q [V, V] after each last token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    target, draft = logits.softmax(-1)
    return target, draft


def rounds_by_enumeration(mode: str, gamma: int) -> float:
    """Expected rounds for LENGTH tokens after token 0, over all that draft and target may do."""
    target, draft = tables(1)

    def begin(last: int, missing: int) -> float:
        return 1 + test(last, missing, gamma) if missing else 0.0

    def test(last: int, missing: int, left: int) -> float:
        """Rounds after the one under way, of which `left` proposals are still to be tested."""
        if not missing:
            return 0.0
        p, q = target[last].tolist(), draft[last].tolist()
        total = 0.0
        for x in range(VOCAB):
            accepted = 0.0
            if left:
                is_best = q[x] == max(q)
                both = {"sampled": min(p[x], q[x]), "argmax": p[x] * is_best, "match": p[x] * q[x]}
                accepted = both[mode]
            total += accepted * test(x, missing - 1, left - 1)
            total += (p[x] - accepted) * begin(x, missing - 1)
        return total

    return begin(0, LENGTH)


@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("mode", SHARES)
def test_texts_of_the_target_tell_how_many_rounds_decoding_takes(mode: str, gamma: int) -> None:
    target, draft = tables(1)
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    before = torch.cat([torch.zeros(len(texts), 1, dtype=torch.long), texts[:, :-1]], dim=1)
    likelihood = target[before, texts].prod(-1)
    both = {"target_probs": target[before], "draft_probs": draft[before], "tokens": texts}
    found = rounds_of_texts([*SHARES[mode](**both)], gamma)
    expected = rounds_by_enumeration(mode, gamma)
    assert float(found.counts @ likelihood) == pytest.approx(expected, rel=1e-12)


def test_ragged_texts_count_as_if_alone_and_cut_ones_go_on() -> None:
    shares = [torch.tensor([0.9, 0.2, 0.7, 0.5]), torch.tensor([0.3]), torch.tensor([0.6, 1.0])]
    together = rounds_of_texts(shares, 3, cut=torch.tensor([False] * 3))
    assert together.totals.tolist() == [4, 1, 2]
    for row, share in enumerate(shares):
        alone = rounds_of_texts([share], 3, cut=torch.tensor([False]))
        assert float(alone.counts) == pytest.approx(float(together.counts[row]))
    constant = rounds_of_texts([torch.full((6,), 0.8)], 3)
    assert float(constant.totals / constant.counts) > 6 / float(constant.counts)
    long = rounds_of_texts([torch.full((4000,), 0.8)], 3)
    assert float(long.totals / long.counts) == pytest.approx(expected_tokens(0.8, 3), rel=1e-4)


def test_a_round_behind_a_cut_emits_what_it_would_after_accepted_proposals() -> None:
    """Texts whose easy tokens stand together, cut after 12, beside rounds that see all 16."""
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(6000, 16, generator=generator)
    easy = [draws[:, 0] < 0.5]
    for column in draws.T[1:]:
        easy.append(column < torch.where(easy[-1], 0.8, 0.2))
    emitted = rounds = 0
    for text in torch.stack(easy, dim=1).tolist():
        begin = 0
        while begin < 12:
            accepted = [*text[begin : begin + 4], False].index(False)
            emitted, rounds, begin = emitted + accepted + 1, rounds + 1, begin + accepted + 1
    predicted = rounds_of_texts([*torch.stack(easy, dim=1)[:, :12].double()], 4)
    assert predicted.counts.sum() == rounds
    assert predicted.mean == pytest.approx(emitted / rounds, abs=0.01)  # by the average 0.04 less


# Exactness


def test_alpha_is_the_acceptance_that_speculative_sampling_realises() -> None:
    generator = torch.Generator().manual_seed(8)
    target_probs, draft_probs = (
        torch.randn(5, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2)
    )
    measured = measure_round(
        VERIFIERS["speculative"],
        target=lambda history: target_probs.expand(len(history), 5),
        draft=lambda history: draft_probs.expand(len(history), 5),
        vocab_size=5,
        gamma=4,
    )
    alpha = sampled_acceptance(target_probs=target_probs, draft_probs=draft_probs).item()
    assert measured.expected_accepted() == pytest.approx(expected_tokens(alpha, 4) - 1, abs=1e-12)
    histogram = torch.stack([measured.mass[measured.accepted == n].sum() for n in range(5)])
    iid = [alpha**n * (1 - alpha) for n in range(4)] + [alpha**4]
    expected = torch.tensor(iid, dtype=torch.float64)
    torch.testing.assert_close(histogram, expected, rtol=0, atol=1e-12)


def test_acceptance_given_the_chain_is_that_of_the_texts_that_came_so_far():
    """By hand: a round begins at every token; its third proposal is there in three of nine."""
    texts = [torch.tensor([1.0, 0.5, 0.2, 0.4]), torch.tensor([0.6, 0.0, 1.0]), torch.ones(2)]
    first = (1.0 + 0.5 + 0.2 + 0.4) + (0.6 + 0.0 + 1.0) + (1.0 + 1.0)
    second = (1.0 * 0.5 + 0.5 * 0.2 + 0.2 * 0.4) + (0.6 * 0.0 + 0.0 * 1.0) + 1.0 * 1.0
    second_tested = (1.0 + 0.5 + 0.2) + (0.6 + 0.0) + 1.0
    third = (1.0 * 0.5 * 0.2 + 0.5 * 0.2 * 0.4) + 0.6 * 0.0 * 1.0
    third_tested = (1.0 * 0.5 + 0.5 * 0.2) + 0.6 * 0.0
    rates = [first / 9, second / second_tested, third / third_tested]
    assert chain_acceptance(texts, 3) == pytest.approx(rates)
    assert chain_acceptance(texts, 5) == pytest.approx([*rates, 0.4, None])
    assert chain_acceptance([torch.full((9,), 0.7)], 4) == pytest.approx([0.7] * 4)
    assert chain_acceptance([torch.tensor([0.5, 0.0, 0.5])], 3) == [pytest.approx(1 / 3), 0.0, None]
