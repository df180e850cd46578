"""Costs and speed-ups: what is measured, on which rounds, and how it is put together."""

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.evaluation.walltime import (
    PLAIN,
    Costs,
    Setting,
    Timed,
    calibrate,
    measured_speedup,
    time_methods,
)
from tests.distillation.bigram import VOCAB, Bigram

SETTING = Setting(
    sampling=SamplingConfig(),
    max_new_tokens=10,
    gamma=3,
    verification="speculative",
    batch_size=2,
    eos_token_ids=(),
    seed=0,
)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]


def test_verification_costs_between_measured_gammas_lie_on_the_line():
    table = Costs(1.0, 0.1, 1.2, 0.1, verify_ratios={1: 1.0, 2: 1.1, 4: 1.5, 8: 1.9})
    assert [table.verify_at(g) for g in (1, 2, 4, 8)] == pytest.approx([1.0, 1.1, 1.5, 1.9])
    assert table.verify_at(3) == pytest.approx(1.3)
    assert table.verify_at(6) == pytest.approx(1.7)
    assert table.verify_at(12) == pytest.approx(2.3)


def test_the_speedup_is_the_quotient_of_tokens_per_second():
    plain = Timed(seconds=[2.0, 4.0], tokens=[20, 40])
    fast = Timed(seconds=[1.0, 1.0], tokens=[20, 30])
    estimate = measured_speedup(speculative=fast, plain=plain, seed=0, resamples=500)
    assert estimate.mean == pytest.approx(25 / 10)
    assert estimate.low < estimate.mean < estimate.high


class Slow(Bigram):
    """A model whose passes take scripted seconds on a clock of the test."""

    def __init__(self, seed, clock, seconds):
        super().__init__(seed)
        self.clock = clock
        self.seconds = seconds

    def step(self, tokens, *, positions, cache):
        self.clock.now += self.seconds(tokens.shape[1])
        return super().step(tokens, positions=positions, cache=cache)


class Clock:
    """Seconds that pass only where a model says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-9
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("draftkit.evaluation.walltime.synchronised_clock", lambda device: made)
    return made


def test_calibration_finds_the_ratios_that_the_models_cost(clock):
    target = Slow(0, clock, lambda tokens: 10 + 0.5 * (tokens - 1))
    draft = Slow(1, clock, lambda tokens: 2.0)
    found = calibrate(target, draft, PROMPTS, SETTING)
    assert found.plain_seconds == pytest.approx(10)
    assert found.cost_ratio == pytest.approx(0.2)
    assert found.verify_ratio == pytest.approx(1.15)
    assert found.verify_ratios[8] == pytest.approx(1.4)
    assert found.overhead_ratio == pytest.approx(0, abs=1e-6)


def test_methods_take_turns_and_count_tokens_alike(clock):
    target = Slow(0, clock, lambda tokens: 10.0)
    twin = Slow(0, clock, lambda tokens: 1.0)
    timed = time_methods(target, {"twin": twin}, PROMPTS, PROMPTS, SETTING)
    assert set(timed) == {PLAIN, "twin"}
    assert timed[PLAIN].tokens == timed["twin"].tokens == [20, 20]
    assert timed[PLAIN].seconds == pytest.approx([100, 100])
    # a draft equal to its target is always accepted: 4 tokens a round of 3 x 1 + 10 seconds
    assert timed["twin"].seconds == pytest.approx([39, 39])
    assert all(c.accept_counts == [0, 0, 0, 3] for c in timed["twin"].completions)


def test_completions_hold_the_tokens_that_were_timed(clock):
    target = Slow(0, clock, lambda tokens: 1.0)
    timed = time_methods(target, {}, PROMPTS, PROMPTS, SETTING)
    outputs = [c.output_ids for c in timed[PLAIN].completions]
    assert all(len(output) == 10 for output in outputs)
    assert all(0 <= token < VOCAB for output in outputs for token in output)
    assert [c.prompt_ids for c in timed[PLAIN].completions] == PROMPTS
    assert torch.tensor(outputs).unique().numel() > 2
