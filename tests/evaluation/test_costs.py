"""Costs: what is measured, on which rounds, and how ratios are formed."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.graphs import Units
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation import costs, walltime
from draftkit.evaluation.costs import Flow, between, meter
from draftkit.evaluation.walltime import Setting, make_decoder, time_methods
from draftkit.theory.speedup import speedup_from_length
from tests.evaluation.scripted import Clock, Slow

SETTING = Setting(max_new_tokens=12, gamma=3, batch_size=2, capacity=40, eos_token_ids=(0,))
PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]


def calibrate(target, draft, setting, gammas=()):
    measuring = meter(target, lambda: DraftModelProposer(draft), PROMPTS, setting, gammas=gammas)
    measuring.turn(costs.CALIBRATION_TURNS)
    return measuring


def flow_of(target, proposer, gamma):
    return Flow(make_decoder(target, proposer, SETTING), PROMPTS, SETTING, gamma)


@pytest.fixture
def clock(monkeypatch):
    """Few and short bursts, whose seconds are scripted."""
    for name, count in (("CALIBRATION_TURNS", 4), ("BURST", 6), ("SETTLING", 2)):
        monkeypatch.setattr(costs, name, count)
    made = Clock()
    monkeypatch.setattr(walltime, "now", made)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calibration_finds_the_ratios_that_the_models_cost(clock, temperature):
    target = Slow(0, clock, lambda tokens: 10 + 0.5 * (tokens - 1))
    draft = Slow(1, clock, lambda tokens: 2.0)
    setting = replace(SETTING, sampling=SamplingConfig(temperature=temperature))
    found = calibrate(target, draft, setting, gammas=(8, 3))
    measured = found.costs()
    assert measured.plain_seconds == pytest.approx(10)
    assert measured.cost_ratio == pytest.approx(0.2)
    assert measured.verify_ratio == pytest.approx(1.15)
    assert measured.verify_ratios == pytest.approx({0: 1.0, 3: 1.15, 8: 1.4})
    assert measured.draft_units == pytest.approx({3: 0.6, 8: 1.6})
    assert measured.overhead_ratio == pytest.approx(0, abs=1e-12)
    assert found.costs(5).cost_ratio == pytest.approx(0.2)
    assert found.costs(5).verify_ratio == pytest.approx(1.25)


def test_what_the_host_does_around_the_units_is_the_overhead(clock, monkeypatch):
    target = Slow(0, clock, lambda tokens: 10.0)
    draft = Slow(1, clock, lambda tokens: 1.0)
    rounds = Decoder.round

    def slow_round(decoder):
        clock.now += 0.25
        return rounds(decoder)

    monkeypatch.setattr(Decoder, "round", slow_round)
    measured = calibrate(target, draft, SETTING).costs()
    assert measured.plain_seconds == pytest.approx(10.25)
    assert measured.overhead_ratio == pytest.approx(0.25 / 10.25)
    # the parts of a round add up: what is predicted of it is what it takes
    round_seconds = 3 * 1.0 + 10 + 0.25
    predicted = speedup_from_length(
        2.0, 3, measured.cost_ratio, measured.verify_ratio, measured.overhead_ratio
    )
    assert predicted == pytest.approx(2 * 10.25 / round_seconds)


@pytest.mark.parametrize("new_tokens", [1, 12])
def test_late_rounds_cost_what_lies_between_their_results(clock, monkeypatch, new_tokens):
    """As on CUDA: what the host does is part of a round only once, however late it is read."""
    monkeypatch.setattr(costs, "Flow", partial(Flow, late=True))
    target = Slow(0, clock, lambda tokens: 10 + 0.5 * (tokens - 1))
    draft = Slow(1, clock, lambda tokens: 2.0)
    setting = replace(SETTING, max_new_tokens=new_tokens, eos_token_ids=())
    measured = calibrate(target, draft, setting, gammas=(8,)).costs()
    assert measured.plain_seconds == pytest.approx(10)
    assert measured.cost_ratio == pytest.approx(0.2)
    assert measured.verify_ratios == pytest.approx({0: 1.0, 3: 1.15, 8: 1.4})
    assert measured.overhead_ratio == pytest.approx(0, abs=1e-12)


def test_a_devices_own_marks_are_seconds_apart(monkeypatch):
    class Event:
        made = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "stream of cuda:1"
            Event.made += 2.5
            self.at = Event.made

        def elapsed_time(self, other):
            return other.at - self.at  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = walltime.device_clock(torch.device("cuda", 1))
    first, second = clock(), clock()
    assert second - first == pytest.approx(0.0025)


def test_a_disturbance_that_lasts_cancels_in_the_ratios(clock):
    """The machine gets slower all the time; what is measured a turn apart is compared."""
    rising = [1.0]

    def seconds(base):
        def take(tokens):
            rising[0] *= 1.001
            return base * rising[0]

        return take

    target, draft = Slow(0, clock, seconds(10.0)), Slow(1, clock, seconds(1.0))
    found = calibrate(target, draft, SETTING)
    assert rising[0] > 1.1
    assert found.costs().verify_ratio == pytest.approx(1.0, rel=0.01)
    assert found.costs().cost_ratio == pytest.approx(0.1, rel=0.01)


def test_single_slow_rounds_do_not_move_a_median(clock):
    calls = [0]

    def take(tokens):
        calls[0] += 1
        return 1000.0 if calls[0] % 97 == 0 else 10.0

    found = calibrate(Slow(0, clock, take), Slow(1, clock, lambda n: 1.0), SETTING)
    assert found.costs().verify_ratio == pytest.approx(1.0)
    assert found.costs().cost_ratio == pytest.approx(0.1)


def test_a_burst_is_measured_once_it_has_settled(clock):
    """The first rounds behind other work are slow; those that follow each other count, all."""
    seconds = iter([50.0, 20.0, 4.0, 5.0, 9.0])
    flow = flow_of(Slow(0, clock, lambda tokens: next(seconds)), None, 0)
    assert flow.burst(5, 2).verify == pytest.approx(6.0)


@pytest.mark.parametrize("chunks", [1, 5, 12, 30])
def test_turns_stand_evenly_between_the_chunks(chunks):
    class Counting:
        def __init__(self):
            self.counts = []

        def turn(self, count):
            self.counts.append(count)

    meters = [Counting(), Counting()]
    before = between(meters, 12)
    for chunk in range(chunks):
        before(chunk, chunks)
    for one in meters:
        assert sum(one.counts) == 12
        assert one.counts[0] > 0
        assert max(one.counts) - min(one.counts) <= 1


def test_batches_are_full_and_begin_anew_as_soon_as_a_row_ends(clock):
    target = Slow(0, clock, lambda tokens: 1.0)
    flow = flow_of(target, None, 0)
    begun = set()
    for _ in range(60):
        assert flow.round().verify == 1.0
        slots = flow.decoder.state.slots.values()
        assert len(slots) in (0, SETTING.batch_size)
        assert not any(slot.is_finished for slot in slots)
        begun |= {slot.request.row for slot in slots}
    assert len(begun) > 2 * 60 / SETTING.max_new_tokens  # some ended before the length limit


def test_timed_generations_run_the_code_that_was_compiled_for_the_calibration(clock, monkeypatch):
    """Compiling takes longer than measuring: no unit may be needed in two forms."""
    keys = set()

    def run(self, unit, places, inputs, *, key, **options):
        if self.compiled:
            keys.add((unit.__name__, key))
        return unit(places, inputs)

    monkeypatch.setattr(Units, "run", run)
    setting = replace(SETTING, batch_size=1, compiled=True)
    target, draft = Slow(0, clock, lambda n: 1.0), Slow(1, clock, lambda n: 1.0)
    calibrate(target, draft, setting)
    calibrated = set(keys)
    keys.clear()
    time_methods(target, {"draft": DraftModelProposer(draft)}, PROMPTS, PROMPTS, setting)
    assert keys == calibrated
    assert sorted(name for name, _ in keys) == ["propose", "verify", "verify"]
