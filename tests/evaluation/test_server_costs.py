"""A server measures what rounds cost on its own idle decoder, which is left as it was."""

import pytest

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation import costs
from draftkit.evaluation.costs import decoder_costs, measured_policy
from draftkit.theory.speedup import Costs
from tests import tiny
from tests.decoding.driving import DRAFT, request
from tests.evaluation.scripted import Clock, Slow
from tests.tabular import random_adapter, relative


def slow_decoder(monkeypatch: pytest.MonkeyPatch, draft_seconds: float) -> Decoder:
    """8 slots; a step of N tokens takes 1 + N / 10 seconds, of the draft times `draft_seconds`."""
    clock = Clock()
    monkeypatch.setattr("draftkit.evaluation.walltime.now", clock)
    made = Decoder(Slow(1, clock, lambda n: 1 + n / 10), slots=8, capacity=64)
    draft = Slow(2, clock, lambda n: draft_seconds * (1 + n / 10))
    made.attach(DRAFT, DraftModelProposer(draft))
    return made


def decoder(slots: int = 8, *, late: bool = False) -> Decoder:
    target, draft = tiny.pair()
    made = Decoder(target, slots=slots, capacity=64, late=late)
    made.attach(DRAFT, DraftModelProposer(draft))
    return made


@pytest.mark.parametrize("late", [False, True])
def test_costs_are_positive_and_the_decoder_is_idle_again(late: bool) -> None:
    made = decoder(late=late)
    measured = decoder_costs(made, DRAFT, 4, [0, 1, 3])
    assert set(measured.verify_ratios) == {0, 1, 3}
    assert measured.plain_seconds > 0
    assert 0.1 < measured.cost_ratio < 10  # the draft is as large as the target
    assert measured.overhead_ratio > 0
    assert measured.verify_ratios[0] < 1 < measured.verify_ratios[0] + 0.9
    assert made.free_slots == 8
    assert (made.late, made.clock) == (late, None)
    made.join([request([1, 2, 3], gamma=2)])
    made.round()
    (result,) = made.round()
    assert result.seconds == (0, 0, 0)


def test_a_short_cache_is_enough_to_measure() -> None:
    target = random_adapter(8, 1)
    made = Decoder(target, slots=2, capacity=14)
    made.attach(DRAFT, DraftModelProposer(relative(target, 2)))
    assert decoder_costs(made, DRAFT, 2, [0, 4]).plain_seconds > 0


def test_the_costs_are_those_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = decoder_costs(slow_decoder(monkeypatch, 0.2), DRAFT, 8, [0, 1, 4])
    assert measured.plain_seconds == pytest.approx(1.1)
    assert measured.verify_ratios == pytest.approx({0: 1.0, 1: 1.2 / 1.1, 4: 1.5 / 1.1})
    assert measured.verify_ratio == measured.verify_ratios[4]
    first_takes_two = 1.2 + 3 * 1.1
    units = {1: 0.2 * 1.2 / 1.1, 4: 0.2 * first_takes_two / 1.1}  # each number is measured
    assert measured.draft_units == pytest.approx(units)
    assert measured.cost_ratio == pytest.approx(units[4] / 4)
    assert measured.overhead_ratio == 0


@pytest.mark.parametrize(("draft_seconds", "chosen"), [(1.0, 0), (0.05, 2)])
def test_a_draft_pays_or_not_by_its_measured_cost(
    monkeypatch: pytest.MonkeyPatch, draft_seconds: float, chosen: int
) -> None:
    policy = measured_policy(slow_decoder(monkeypatch, draft_seconds), DRAFT, 4)
    for batch in (1, 8):
        assert policy.choose(batch=batch, most=4) == chosen  # alpha is 1/2 beforehand


@pytest.mark.parametrize(("slots", "sizes"), [(16, {1, 4, 16}), (1, {1})])
def test_batch_sizes_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, slots: int, sizes: set[int]
) -> None:
    measured: list[int] = []
    real = costs.decoder_costs

    def recorded(decoder: Decoder, proposer_id: str, size: int, gammas: list[int]) -> Costs:
        measured.append(size)
        return real(decoder, proposer_id, size, gammas)

    monkeypatch.setattr(costs, "decoder_costs", recorded)
    measured_policy(decoder(slots), DRAFT, 2)
    assert set(measured) == sizes
