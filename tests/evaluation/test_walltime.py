"""Wall time: what the clock counts, in which order methods run, and how speed-ups are formed."""

from dataclasses import replace

import pytest

from draftkit.decoding import graphs
from draftkit.decoding.generation import Completion
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation import walltime
from draftkit.evaluation.intervals import speedup
from draftkit.evaluation.walltime import (
    PLAIN,
    Chunk,
    FullBatch,
    Setting,
    Timed,
    decoding,
    rotated,
    row_capacity,
    shapes,
    take_turns,
    time_methods,
    until_certain,
    warm_up,
)
from tests.evaluation.scripted import Clock, Slow

SETTING = Setting(max_new_tokens=10, gamma=3, batch_size=2, capacity=40)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(walltime, "now", made)
    return made


def test_a_compilation_is_taken_out_of_a_timed_chunk(monkeypatch, clock):
    """The real clock, with a unit that compiles for 50 seconds in the middle of a round."""
    monkeypatch.undo()
    spent = [graphs.compile_seconds()]
    real = walltime.time.perf_counter

    class Compiling(Slow):
        def step(self, tokens, *, positions, cache, last=0):
            spent[0] += 50
            return super().step(tokens, positions=positions, cache=cache, last=last)

    monkeypatch.setattr(walltime, "compile_seconds", lambda: spent[0])
    monkeypatch.setattr(walltime.time, "perf_counter", lambda: real() + spent[0])
    method = decoding(Compiling(0, clock, lambda tokens: 0.0), None, SETTING)
    chunk = method(PROMPTS[:2], 0)
    assert spent[0] >= 500
    assert 0 < chunk.prefill_seconds + chunk.seconds < 25


def timed_of(prefill_seconds, seconds, tokens, full=None):
    """A method with so many tokens in each chunk."""
    answers = [[Completion([], [0] * count)] for count in tokens]
    chunks = zip(prefill_seconds, seconds, answers, [full] * len(tokens), strict=True)
    return Timed([Chunk(*chunk) for chunk in chunks])


def test_what_is_one_observation_of_time_is_a_document_or_a_batch():
    alone = replace(timed_of([1.0] * 40, [2.0] * 40, range(1, 41)), documents=[*range(20)] * 2)
    assert speedup(alone.answers, alone.rounds).documents == 20
    two = [Completion([], [0])] * 2
    batched = Timed([Chunk(1.0, 2.0, two)] * 20, documents=[*range(40)])
    assert speedup(batched.answers, batched.rounds).documents == 20


def test_a_rate_is_of_all_tokens_over_all_seconds():
    timed = timed_of([2.0, 1.0], [2.0, 4.0], [20, 40])
    assert (timed.answers.totals / timed.answers.counts).tolist() == [5.0, 8.0]
    assert timed.rounds.mean == 10.0
    assert timed.answers.mean == pytest.approx(60 / 9)
    assert timed.prefill_seconds == 3.0


def test_prefill_and_rounds_are_timed_apart(clock):
    target = Slow(0, clock, lambda tokens: 10.0)
    chunk = decoding(target, None, SETTING)(PROMPTS[:2], 0)
    assert chunk.prefill_seconds == 100  # one pass over the first token of the longer prompt
    assert chunk.seconds == 100  # ten steps


def test_methods_decode_alike_and_count_tokens_alike(clock):
    target = Slow(0, clock, lambda tokens: 10.0)
    twin = Slow(0, clock, lambda tokens: 1.0)
    timed = time_methods(target, {"twin": DraftModelProposer(twin)}, PROMPTS, PROMPTS, SETTING)
    assert set(timed) == {PLAIN, "twin"}
    for name in (PLAIN, "twin"):
        assert [chunk.tokens for chunk in timed[name].chunks] == [20, 20]
    assert [chunk.seconds for chunk in timed[PLAIN].chunks] == pytest.approx([100, 100])
    # a draft equal to its target is always accepted: 4 tokens a round of 3 x 1 + 10 seconds
    assert [chunk.seconds for chunk in timed["twin"].chunks] == pytest.approx([39, 39])
    assert all(c.accept_counts == [0, 0, 0, 3] for c in timed["twin"].completions)


def test_a_batch_is_full_until_its_first_row_ends(clock):
    target = Slow(0, clock, lambda tokens: 10.0)
    setting = replace(SETTING, max_new_tokens=40, capacity=80)
    ends = replace(setting, eos_token_ids=(0, 1))
    chunk = decoding(target, DraftModelProposer(target), ends)(PROMPTS[:2], 0)
    rounds = sorted(completion.rounds for completion in chunk.completions)
    assert rounds[0] < rounds[1]
    assert chunk.full.row_rounds == 2 * rounds[0]
    assert chunk.full.seconds == rounds[0] * 40 < chunk.seconds  # three drafts, one verification
    assert (
        chunk.full.tokens == chunk.full.emitted < sum(len(c.output_ids) for c in chunk.completions)
    )


def test_the_speedup_of_full_batches_leaves_out_what_comes_behind():
    plain = timed_of([1.0, 1.0], [9.0, 9.0], [90, 90], FullBatch(2.0, 20, 20, 20))
    fast = timed_of([1.0, 1.0], [9.0, 9.0], [90, 90], FullBatch(1.0, 30, 10, 31))
    assert speedup(fast.full_batches, plain.full_batches).mean == pytest.approx(3)
    assert fast.full_length == 3.1


def recorder(calls, name):
    def method(prompts, first):
        calls.append((name, first, len(prompts)))
        return Chunk(0.0, 1.0, [Completion(list(p), [0]) for p in prompts])

    return method


def test_methods_take_turns_and_none_always_goes_first():
    calls = []
    methods = {name: recorder(calls, name) for name in ("a", "b", "c")}
    timed = take_turns(methods, PROMPTS * 2, SETTING)
    assert [name for name, _, _ in calls] == [*"abc", *"bca", *"cab", *"abc"]
    assert [first for _, first, _ in calls] == [0, 0, 0, 2, 2, 2, 4, 4, 4, 6, 6, 6]
    for name in methods:
        assert [c.prompt_ids for c in timed[name].completions] == PROMPTS * 2
    assert rotated([1, 2, 3], 5) == [3, 1, 2]


def test_a_warm_up_meets_every_shape_that_a_batch_may_shrink_to():
    crowd = replace(SETTING, batch_size=8, compiled=True)
    assert shapes(crowd) == [1, 4, 8]
    assert shapes(replace(crowd, compiled=False)) == [8]
    calls = []
    methods = {name: recorder(calls, name) for name in ("plain", "drafted")}
    warm_up(methods, PROMPTS, crowd, drafted=["drafted"])
    assert calls == [("plain", 0, 8), ("drafted", 0, 1), ("drafted", 0, 4), ("drafted", 0, 8)]


def test_the_capacity_holds_every_row_that_is_timed(clock):
    target = Slow(0, clock, lambda tokens: 1.0)
    for gamma in (0, 3, 12):
        capacity = row_capacity(PROMPTS, max_new_tokens=10, gamma=gamma)
        fitting = replace(SETTING, gamma=gamma, capacity=capacity)
        draft = DraftModelProposer(target) if gamma else None
        assert decoding(target, draft, fitting)(PROMPTS[2:], 0).completions
    with pytest.raises(ValueError, match="cache slots"):
        decoding(target, DraftModelProposer(target), replace(SETTING, capacity=12))(PROMPTS[2:], 0)


def sampled_chunks(count, seconds, spread=0.0):
    """Chunks of ten tokens that take about `seconds`, alternately more and less."""
    return [
        Chunk(0.0, seconds * (1 + spread * (-1) ** row), [Completion([], [0] * 10)])
        for row in range(count)
    ]


@pytest.mark.parametrize(("spread", "looked"), [(0.01, 24), (0.2, 96)])
def test_timing_ends_at_the_first_look_at_which_the_best_interval_is_narrow(clock, spread, looked):
    """Of the fastest way; another, which varies more, is not waited for."""
    enough = until_certain(60.0, lambda line: None)
    for count in range(1, 400):
        timed = {
            PLAIN: Timed(sampled_chunks(count, 2.0)),
            "fast": Timed(sampled_chunks(count, 1.0, spread)),
            "slow": Timed(sampled_chunks(count, 3.0, 0.9)),
        }
        if enough(timed):
            break
    assert count == looked


def test_timing_ends_after_its_minutes_which_is_said(clock):
    notes = []
    enough = until_certain(120.0, notes.append)
    timed = {PLAIN: Timed(sampled_chunks(3, 2.0)), "fast": Timed(sampled_chunks(3, 1.0))}
    assert not enough(timed)
    clock.now += 121
    assert enough(timed)
    assert notes == ["timed 3 prompts in 2 minutes (evaluate.timing_minutes)"]


def test_only_as_many_prompts_are_timed_as_it_takes(clock):
    target = Slow(0, clock, lambda n: 10.0)
    timed = time_methods(
        *(target, {}, PROMPTS, PROMPTS, SETTING),
        enough=lambda timed: len(timed[PLAIN].chunks) == 1,
        documents=["a", "b", "c", "d"],
    )
    assert [c.prompt_ids for c in timed[PLAIN].completions] == PROMPTS[:2]
    assert timed[PLAIN].of_prompts([(1, 1)] * 2).documents == ["a", "b"]
