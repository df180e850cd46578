"""What rounds cost is measured on an idle decoder, which is left as it was."""

import pytest

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import FixedGamma
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.serving.costs import SteppedGamma, measure, measured_policy, sizes
from tests import tiny
from tests.decoding.driving import DRAFT, request
from tests.tabular import random_adapter, relative


def decoder(slots: int = 8, *, late: bool = False) -> Decoder:
    target, draft = tiny.pair()
    made = Decoder(target, slots=slots, capacity=64, late=late)
    made.attach(DRAFT, DraftModelProposer(draft))
    return made


@pytest.mark.parametrize("late", [False, True])
def test_costs_are_positive_and_the_decoder_is_idle_again(late: bool) -> None:
    made = decoder(late=late)
    costs = measure(made, DRAFT, 4, [0, 1, 3])
    assert set(costs.verify_ratios) == {0, 1, 3}
    assert costs.plain_seconds > 0
    assert 0.1 < costs.cost_ratio < 10  # the draft is as large as the target
    assert costs.verify_ratios[0] < 1 < costs.verify_ratios[0] + 0.9
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
    assert measure(made, DRAFT, 2, [0, 4]).plain_seconds > 0


def test_a_draft_as_large_as_its_target_does_not_pay() -> None:
    policy = measured_policy(decoder(), DRAFT, 4)
    assert policy.choose(batch=8, most=4) == 0


def test_batch_sizes_that_are_measured() -> None:
    assert sizes(decoder(16)) == [1, 4, 16]
    assert sizes(decoder(1)) == [1]


def test_steps_are_kept_to_from_below() -> None:
    for wished, chosen in ((0, 0), (1, 1), (2, 1), (3, 3), (7, 3)):
        policy = SteppedGamma(FixedGamma(wished), [1, 3])
        assert policy.choose(batch=1, most=9) == chosen
    assert SteppedGamma(FixedGamma(9), [1, 3]).choose(batch=1, most=2) == 1
