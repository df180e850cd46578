"""Costs: what is measured, on which rounds, and how ratios are formed."""

from collections import Counter
from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.graphs import Units
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.results import RoundSeconds
from draftkit.evaluation import costs, walltime
from draftkit.evaluation.costs import calibrate, predicted_speedup, round_seconds
from draftkit.evaluation.walltime import (
    CALIBRATED_GAMMAS,
    PLAIN,
    Setting,
    decoding,
    make_decoder,
    time_ways,
)
from draftkit.theory.speedup import speedup_from_length
from tests.evaluation.scripted import Clock, Slow

SETTING = Setting(max_new_tokens=12, gamma=3, batch_size=2, capacity=40, eos_token_ids=(0,))
PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]


def calibrated(target, draft, setting, **options):
    plain, drafted = decoders(target, draft, setting)
    return calibrate(plain, drafted, PROMPTS, setting, **options)


def decoders(target, draft, setting):
    return [make_decoder(target, one, setting) for one in (None, DraftModelProposer(draft))]


@pytest.fixture
def clock(monkeypatch):
    """Seconds are scripted."""
    made = Clock()
    monkeypatch.setattr(walltime, "now", made)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calibration_finds_the_ratios_that_the_models_cost(clock, temperature):
    target = Slow(0, clock, lambda tokens: 10 + 0.5 * (tokens - 1))
    draft = Slow(1, clock, lambda tokens: 2.0)
    setting = replace(SETTING, sampling=SamplingConfig(temperature=temperature))
    measured = calibrated(target, draft, setting, gammas=(8, 3))
    assert measured.plain_seconds == pytest.approx(10)
    assert measured.cost_ratio == pytest.approx(0.2)
    assert measured.verify_ratio == pytest.approx(1.15)
    assert measured.verify_ratios == pytest.approx({0: 1.0, 3: 1.15, 8: 1.4})
    assert measured.draft_units == pytest.approx({3: 0.6, 8: 1.6})
    assert measured.overhead_ratio == pytest.approx(0, abs=1e-12)
    assert measured.at(5).cost_ratio == pytest.approx(0.2)
    assert measured.at(5).verify_ratio == pytest.approx(1.25)


def test_what_the_host_does_around_the_units_is_the_overhead(clock, monkeypatch):
    target = Slow(0, clock, lambda tokens: 10.0)
    draft = Slow(1, clock, lambda tokens: 1.0)
    rounds = Decoder.round

    def slow_round(decoder):
        clock.now += 0.25
        return rounds(decoder)

    monkeypatch.setattr(Decoder, "round", slow_round)
    measured = calibrated(target, draft, SETTING)
    assert measured.plain_seconds == pytest.approx(10.25)
    assert measured.overhead_ratio == pytest.approx(0.25 / 10.25)
    # the parts of a round add up: what is predicted of it is what it takes
    round_seconds = 3 * 1.0 + 10 + 0.25
    predicted = speedup_from_length(
        2.0, 3, measured.cost_ratio, measured.verify_ratio, measured.overhead_ratio
    )
    assert predicted == pytest.approx(2 * 10.25 / round_seconds)


def test_late_rounds_take_what_lies_between_their_results(clock, monkeypatch):
    """As on CUDA, where the host works while the device does: here it takes no time."""
    target = Slow(0, clock, lambda tokens: 10.0)
    draft = Slow(1, clock, lambda tokens: 1.0)
    rounds = Decoder.round

    def round_of_a_host(decoder):
        clock.now += 0 if decoder.late else 2.0
        return rounds(decoder)

    monkeypatch.setattr(Decoder, "round", round_of_a_host)
    setting = replace(SETTING, max_new_tokens=2000, capacity=2020, eos_token_ids=())
    decoder = make_decoder(target, DraftModelProposer(draft), setting)
    decoder.late = True
    found = round_seconds(decoder, PROMPTS, setting, gamma=3, most=400)
    assert decoder.late
    assert decoder.clock is None
    assert sum(found) == pytest.approx(13, rel=0.01)  # of 15 one by one
    assert found.propose == pytest.approx(3 * 13 / 15, rel=0.01)
    assert found.rest == pytest.approx(2 * 13 / 15, rel=0.01)


def test_a_disturbance_that_lasts_cancels_in_the_ratios(clock):
    """The machine gets slower all the time; what is measured in one pass is compared."""
    rising = [1.0]

    def seconds(base):
        def take(tokens):
            rising[0] *= 1.001
            return base * rising[0]

        return take

    target, draft = Slow(0, clock, seconds(10.0)), Slow(1, clock, seconds(1.0))
    measured = calibrated(target, draft, SETTING)
    assert rising[0] > 1.1
    assert measured.verify_ratio == pytest.approx(1.0, rel=0.01)
    assert measured.cost_ratio == pytest.approx(0.1, rel=0.01)


def test_a_pass_that_was_disturbed_does_not_move_the_median(clock, monkeypatch):
    """Of four: in one of them verification takes ten times as long."""
    real, calls = costs.round_seconds, []

    def disturbed(decoder, *prompts, gamma, **options):
        calls.append(gamma)
        parts = real(decoder, *prompts, gamma=gamma, **options)
        is_hit = gamma == 3 and calls.count(3) == 3
        return parts._replace(verify=10 * parts.verify) if is_hit else parts

    monkeypatch.setattr(costs, "round_seconds", disturbed)
    target, draft = Slow(0, clock, lambda n: 10.0), Slow(1, clock, lambda n: 1.0)
    measured = calibrated(target, draft, SETTING)
    assert calls == [0, 3] + [0, 3, 3, 0] * 2  # once for the code, then forwards and backwards
    assert measured.verify_ratio == pytest.approx(1.0)
    assert measured.cost_ratio == pytest.approx(0.1)


@pytest.mark.parametrize(("seconds", "passes"), [(0.01, 24), (0.25, 10), (10.0, 4)])
def test_short_passes_are_repeated_for_some_seconds(clock, monkeypatch, seconds, passes):
    """Behind a first one, which makes the code."""
    calls = []

    def timed(decoder, *prompts, gamma, **options):
        calls.append(gamma)
        clock.now += seconds
        return RoundSeconds(1.0, 1.0, 0.0)

    monkeypatch.setattr(costs, "SECONDS", 5.0)
    monkeypatch.setattr(costs, "round_seconds", timed)
    calibrated(Slow(0, clock, lambda n: 10.0), Slow(1, clock, lambda n: 1.0), SETTING)
    assert calls.count(0) == calls.count(3) == 1 + passes


def test_calibration_answers_whole_batches_until_it_has_seen_enough_rounds(clock, monkeypatch):
    """As timed generations do: they begin full, and shrink as their rows end."""
    sizes, joins = [], []
    rounds, join = Decoder.round, Decoder.join

    def counted(decoder):
        sizes.append(sum(not slot.is_finished for slot in decoder.state.slots.values()))
        return rounds(decoder)

    def joined(decoder, requests):
        joins.append([request.row for request in requests])
        return join(decoder, requests)

    monkeypatch.setattr(Decoder, "round", counted)
    monkeypatch.setattr(Decoder, "join", joined)
    plain = make_decoder(Slow(0, clock, lambda tokens: 1.0), None, SETTING)
    found = round_seconds(plain, PROMPTS, SETTING, gamma=0, first=2, least=60)
    assert found == (0, 1, 0)
    assert len(sizes) >= 60
    assert len(sizes) - 60 < SETTING.max_new_tokens
    assert {*sizes} == {1, 2}
    assert joins == [[row, row + 1] for row in range(2, 2 + 2 * len(joins), 2)]
    assert plain.free_slots == SETTING.batch_size


@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_is_predicted_from_other_prompts_is_what_timing_shows(clock, monkeypatch, batch_size):
    """A pass costs more the more rows it has, and rows of a batch end apart."""
    monkeypatch.setattr(costs, "ROUNDS", 200)

    def by_rows(seed, seconds):
        model = Slow(seed, clock, lambda tokens: 0.0)
        step = model.step

        def slow_step(tokens, **options):
            clock.now += seconds * (4 + tokens.numel())
            return step(tokens, **options)

        model.step = slow_step
        return model

    setting = replace(SETTING, batch_size=batch_size, max_new_tokens=60, capacity=100)
    setting = replace(setting, sampling=SamplingConfig(temperature=1.0))
    target, draft = by_rows(0, 1.0), by_rows(1, 0.1)
    plain, drafted = decoders(target, draft, setting)
    measured = calibrate(plain, drafted, PROMPTS, replace(setting, seed=1))
    ways = {PLAIN: decoding(plain, setting), "draft": decoding(drafted, setting, 3)}
    timed = time_ways(ways, PROMPTS * 40, PROMPTS, batch_size=batch_size)
    plain, drafted = timed[PLAIN], timed["draft"]
    predicted = predicted_speedup(drafted, plain, measured)
    assert predicted == pytest.approx(drafted.rounds.mean / plain.rounds.mean, rel=0.05)


@pytest.fixture
def keys(monkeypatch):
    """The units that would be compiled."""
    found = set()

    def run(self, unit, places, inputs, *, key, **options):
        if self.compiled:
            found.add((unit.__name__, key))
        return unit(places, inputs)

    monkeypatch.setattr(Units, "run", run)
    return found


@pytest.mark.parametrize(
    ("gamma", "others", "guesses"),
    [(4, [1, 8], [3, 12]), (2, [8], [3, 12]), (3, [1, 8], [12]), (11, [1, 8], [3])],
)
def test_passes_that_no_draft_runs_are_measured_with_guesses(clock, gamma, others, guesses):
    """A draft's proposals there would be code of its own. What they cost stays on its line."""
    target = Slow(0, clock, lambda tokens: 10.0 + 5 * (tokens > 4) + 5 * (tokens > 8))
    draft = Slow(1, clock, lambda tokens: 2.0)
    setting = replace(SETTING, gamma=gamma, capacity=48)
    guessed, said = make_decoder(target, PromptLookup(), setting), list[str]()
    options = {"gammas": (1, 8), "guessed": guessed, "guesses": (3, 12), "note": said.append}
    measured = calibrated(target, draft, setting, **options)
    counts = [0, gamma, *others, *guesses]
    assert said == [f"first rounds of {count} proposals" for count in counts]
    assert (measured.verify_at(3), measured.verify_at(12)) == pytest.approx((1.0, 2.0))
    assert measured.draft_units == pytest.approx({one: 0.2 * one for one in (gamma, *others)})


@pytest.mark.parametrize(
    ("gamma", "others"), [(4, [1, 8]), (2, [4, 8]), (7, [1, 4]), (3, [1, 8]), (16, [1, 4, 8])]
)
def test_few_numbers_of_proposals_are_compiled_and_few_rounds_run(
    clock, monkeypatch, keys, gamma, others
):
    """A unit takes some ten seconds to compile, for a model of thirty layers: so few of them.

    Proposals next to the number in use are not tried. An answer need not be whole: plain steps go
    over 96 tokens at most, the others over as long texts.
    """
    rounds = Counter()
    real = Decoder.round

    def counted(decoder):
        results = real(decoder)
        rounds.update(result.gamma for result in results)
        return results

    monkeypatch.setattr(Decoder, "round", counted)
    setting = replace(SETTING, max_new_tokens=256, batch_size=1, compiled=True, gamma=gamma)
    setting = replace(setting, capacity=300, eos_token_ids=())
    target, draft = Slow(0, clock, lambda n: 10.0), Slow(1, clock, lambda n: 1.0)
    said = list[str]()
    measured = calibrated(target, draft, setting, gammas=CALIBRATED_GAMMAS, note=said.append)
    assert said == [f"first rounds of {count} proposals" for count in (0, gamma, *others)]
    assert sorted(measured.draft_units) == sorted([gamma, *others])
    assert Counter(name for name, _ in keys) == {
        "propose": 1 + len(others),
        "verify": 2 + len(others),
    }
    passes = 1 + costs.PASSES  # the first one makes the code
    assert rounds[0] == passes * 96
    for kind in (gamma, *others):
        assert passes * 32 <= rounds[kind] <= passes * 96
    # What more proposals cost lies on the line through the last two.
    assert measured.draft_at(12) == pytest.approx(12 * 0.1)
    assert measured.verify_at(12) == pytest.approx(1.0)


def test_timed_generations_run_the_code_that_was_compiled_for_the_calibration(clock, keys):
    """Compiling takes longer than measuring: no unit may be needed in two forms."""
    setting = replace(SETTING, batch_size=1, compiled=True)
    target, draft = Slow(0, clock, lambda n: 1.0), Slow(1, clock, lambda n: 1.0)
    plain, drafted = decoders(target, draft, setting)
    calibrate(plain, drafted, PROMPTS, setting)
    known = set(keys)
    keys.clear()
    ways = {PLAIN: decoding(plain, setting), "draft": decoding(drafted, setting, 3)}
    time_ways(ways, PROMPTS, PROMPTS)
    assert keys == known
    assert sorted(name for name, _ in keys) == ["propose", "verify", "verify"]
