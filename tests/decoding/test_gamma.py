"""Gamma policies: the theory's choice, what rounds teach, and when to probe."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from draftkit.decoding.gamma import AdaptiveGamma, costs_at
from draftkit.theory.speedup import Costs, best_gamma, break_even_alpha

MOST = 8
PLAIN_MODEL = Costs(0.01, 0.2, 1.1, 0.1, {1: 1.05, 8: 1.3})  # a draft at a fifth of the target
HOPELESS = Costs(0.01, 1.5, 1.1, 0.1, {1: 1.1, 8: 1.4})  # even alpha = 1 loses


def policy_of(costs: dict[int, Costs], **constants: float) -> AdaptiveGamma:
    """A policy with other constants."""
    return type("Policy", (AdaptiveGamma,), constants)(costs)


def simulate(
    policy: AdaptiveGamma,
    alpha: Callable[[int], float],
    *,
    rounds: int,
    batch: int = 1,
    costs: Costs = PLAIN_MODEL,
) -> tuple[list[int], list[float]]:
    """Rounds of i.i.d. acceptance: the gammas chosen and the speed-up up to each round."""
    generator = random.Random(0)
    gammas, factors, tokens, time = [], [], 0.0, 0.0
    for turn in range(rounds):
        gamma = policy.choose(batch=batch, most=MOST)
        accepted = []
        for _ in range(batch):
            passes = [generator.random() < alpha(turn) for _ in range(gamma)]
            accepted.append([*passes, False].index(False))
        policy.observe(gamma=gamma, accepted=accepted)
        tokens += 1 + sum(accepted) / batch
        parts = gamma * costs.cost_ratio + costs.verify_at(gamma) + costs.overhead_ratio
        time += parts if gamma else 1.0
        gammas.append(gamma)
        factors.append(tokens / time)
    return gammas, factors


# Known costs


def test_costs_are_those_of_the_next_larger_measured_batch_or_of_the_largest() -> None:
    table = {size: Costs(size, 0.1, 1.0, 0.0, {1: 1.0}) for size in (16, 1, 4)}
    found = [costs_at(table, batch).plain_seconds for batch in (1, 2, 4, 5, 16, 99)]
    assert found == [1, 4, 4, 16, 16, 16]


# Learning


def test_the_estimate_is_accepted_over_tests_with_one_of_either_added() -> None:
    policy = policy_of({1: PLAIN_MODEL}, decay=1.0)
    assert policy.alpha == 0.5
    rounds = [[4, 0, 2], [4, 1, 3], [0, 0, 4]]
    for accepted in rounds:
        policy.observe(gamma=4, accepted=accepted)
    # 18 accepted, and of nine rows six ended in a rejection.
    assert policy.alpha == pytest.approx((18 + 1) / (18 + 6 + 2))


def test_evidence_loses_weight_with_every_round_plain_ones_included() -> None:
    policy = policy_of({1: PLAIN_MODEL}, decay=0.5)
    policy.observe(gamma=4, accepted=[4])
    policy.observe(gamma=4, accepted=[0])
    assert policy.alpha == pytest.approx((4 / 2 + 1) / (4 / 2 + 1 + 2))
    policy.observe(gamma=4, accepted=[])  # a round without rows is none
    policy.observe(gamma=0, accepted=[0])
    assert policy.alpha == pytest.approx(3 / 5)
    policy.observe(gamma=1, accepted=[0])
    assert policy.alpha == pytest.approx((2 / 4 + 1) / (3 / 4 + 1 + 2))


@pytest.mark.parametrize("alpha", [0.5, 0.72, 0.9, 0.99])
@pytest.mark.parametrize(("batch", "share"), [(1, 0.96), (8, 0.98)])
def test_the_choice_converges_to_the_best_gamma_of_the_theory(
    alpha: float, batch: int, share: float
) -> None:
    """One row teaches enough to come near the best speed-up."""
    policy = AdaptiveGamma({8: PLAIN_MODEL})
    gammas, factors = simulate(policy, lambda turn: alpha, rounds=800, batch=batch)
    gamma, factor = best_gamma(alpha, PLAIN_MODEL, MOST)
    assert batch == 1 or Counter(gammas[200:]).most_common(1)[0][0] == gamma
    assert factors[-1] > share * factor


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 8])
def test_below_break_even_it_decodes_plainly_and_loses_next_to_nothing(
    alpha: float, batch: int
) -> None:
    even = break_even_alpha(1, 0.2, PLAIN_MODEL.verify_at(1), PLAIN_MODEL.overhead_ratio)
    assert even is not None
    assert alpha < even < 0.4
    policy = AdaptiveGamma({8: PLAIN_MODEL})
    gammas, factors = simulate(policy, lambda turn: alpha, rounds=800, batch=batch)
    assert gammas.count(0) > 0.9 * len(gammas)
    assert factors[-1] > 0.98


@pytest.mark.parametrize("batch", [1, 8])
def test_it_gives_up_after_a_fall_of_alpha_and_recovers_after_a_rise(batch: int) -> None:
    def alpha(turn: int) -> float:
        return 0.05 if 500 <= turn < 1500 else 0.8

    policy = AdaptiveGamma({8: PLAIN_MODEL})
    gammas, _ = simulate(policy, alpha, rounds=2500, batch=batch)
    assert gammas[:500].count(0) < 10
    assert gammas[600:1500].count(0) > 870
    assert gammas[1800:].count(0) < 10
    assert Counter(gammas[1800:]).most_common(1)[0][0] == best_gamma(0.8, PLAIN_MODEL, MOST)[0]


# Probing


def test_failing_probes_are_single_rounds_of_gamma_one_ever_further_apart() -> None:
    policy = policy_of({1: PLAIN_MODEL}, probe_after=8, probe_at_most=128)
    gammas, _ = simulate(policy, lambda turn: 0.0, rounds=1000)
    places = [turn for turn, gamma in enumerate(gammas) if gamma > 0]
    assert places[0] == 0  # the prior would speculate
    waits = [later - earlier - 1 for earlier, later in pairwise(places)]
    assert waits[:6] == [8, 16, 32, 64, 128, 128]
    assert set(waits[6:]) == {128}
    assert {gammas[turn] for turn in places[1:]} == {1}


def probe_once(policy: AdaptiveGamma, accepted: list[int]) -> int:
    """Plain rounds until a probe, which accepts as told; their number."""
    waited = 0
    while (gamma := policy.choose(batch=len(accepted), most=MOST)) == 0:
        policy.observe(gamma=0, accepted=[0] * len(accepted))
        waited += 1
    policy.observe(gamma=gamma, accepted=accepted)
    return waited


def test_a_probe_that_would_pay_makes_the_next_one_come_soon() -> None:
    policy = AdaptiveGamma({4: HOPELESS, 8: PLAIN_MODEL})
    for _ in range(3):
        policy.observe(gamma=8, accepted=[0] * 8)
    nothing, one, half = [0] * 8, [1] + [0] * 7, [1, 0] * 4
    told = [nothing, nothing, one, half, nothing, nothing]
    waits = [probe_once(policy, accepted) for accepted in told]
    assert waits == [8, 16, 32, 64, 8, 16]


def test_nothing_is_tried_where_even_a_perfect_draft_would_not_pay() -> None:
    policy = AdaptiveGamma({1: HOPELESS})
    gammas, _ = simulate(policy, lambda turn: 1.0, rounds=500)
    assert set(gammas) == {0}
    assert AdaptiveGamma({1: PLAIN_MODEL}).choose(batch=1, most=0) == 0


# Losslessness


def test_the_choice_follows_from_earlier_rounds_alone_however_often_it_is_asked() -> None:
    """So texts keep the law that rounds of each gamma have after every text (`test_exactness`)."""
    generator, past = random.Random(1), list[tuple[int, list[int]]]()
    policy = policy_of({2: PLAIN_MODEL}, decay=0.8, probe_after=3)
    for _ in range(120):
        again = policy_of({2: PLAIN_MODEL}, decay=0.8, probe_after=3)
        for gamma, accepted in past:
            again.observe(gamma=gamma, accepted=accepted)
        gamma = policy.choose(batch=2, most=MOST)
        assert again.choose(batch=2, most=MOST) == gamma
        past.append((gamma, [generator.randint(0, gamma) for _ in range(2)]))
        policy.observe(gamma=gamma, accepted=past[-1][1])
    assert len({gamma for gamma, _ in past}) >= 4


def test_steps_are_kept_to_from_below() -> None:
    seen = set()
    for accepted in range(0, 100, 3):
        chosen = []
        for steps in (None, [1, 3]):
            policy = AdaptiveGamma({1: PLAIN_MODEL}, steps=steps)
            policy.observe(gamma=1, accepted=[1] * accepted + [0] * (100 - accepted))
            chosen += [policy.choose(batch=1, most=9), policy.choose(batch=1, most=2)]
        best, few, stepped, few_stepped = chosen
        assert stepped == max(n for n in (0, 1, 3) if n <= best)
        assert few_stepped == max(n for n in (0, 1) if n <= few)
        seen.add(best)
    assert seen >= {0, 1, 2, 3, 5, 9}
