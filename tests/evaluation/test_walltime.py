"""Wall time: what the clock counts, in which order methods run, and how speed-ups are formed."""

from dataclasses import replace

import pytest

from draftkit.decoding import graphs
from draftkit.decoding.generation import Completion
from draftkit.evaluation import walltime
from draftkit.evaluation.intervals import speedup
from draftkit.evaluation.walltime import (
    PLAIN,
    Chunk,
    Setting,
    Timed,
    Way,
    row_capacity,
    time_ways,
)
from tests.evaluation.scripted import Clock, Slow, drafted, plain

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
    way = plain(Compiling(0, clock, lambda tokens: 0.0), SETTING)
    chunk = way.answer(PROMPTS[:2], 0)
    assert spent[0] >= 500
    assert 0 < chunk.prefill_seconds + chunk.seconds < 25


def timed_of(prefill_seconds, seconds, tokens):
    """A way with so many tokens in each chunk."""
    answers = [[Completion([], [0] * count)] for count in tokens]
    chunks = zip(prefill_seconds, seconds, answers, strict=True)
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
    chunk = plain(target, SETTING).answer(PROMPTS[:2], 0)
    assert chunk.prefill_seconds == 100  # one pass over the first token of the longer prompt
    assert chunk.seconds == 100  # ten steps


def test_ways_decode_alike_and_count_tokens_alike(clock):
    target = Slow(0, clock, lambda tokens: 10.0)
    twin = Slow(0, clock, lambda tokens: 1.0)
    ways = {PLAIN: plain(target, SETTING)}
    ways["twin"] = drafted(target, twin, SETTING)
    timed = time_ways(ways, PROMPTS, PROMPTS, batch_size=2)
    assert {name: one.gamma for name, one in timed.items()} == {PLAIN: 0, "twin": 3}
    for name in (PLAIN, "twin"):
        assert [chunk.tokens for chunk in timed[name].chunks] == [20, 20]
    assert [chunk.seconds for chunk in timed[PLAIN].chunks] == pytest.approx([100, 100])
    # a draft equal to its target is always accepted: 4 tokens a round of 3 x 1 + 10 seconds
    assert [chunk.seconds for chunk in timed["twin"].chunks] == pytest.approx([39, 39])
    assert all(c.accept_counts == [0, 0, 0, 3] for c in timed["twin"].completions)


def test_a_batch_shrinks_as_its_rows_end_and_its_rounds_are_those_of_the_longest(clock):
    target = Slow(0, clock, lambda tokens: 10.0)
    ends = replace(SETTING, max_new_tokens=40, capacity=80, eos_token_ids=(0, 1))
    way = drafted(target, target, ends)
    chunk = way.answer(PROMPTS[:2], 0)
    short, long = sorted(completion.rounds for completion in chunk.completions)
    assert short < long
    assert chunk.seconds == long * 40  # three drafts, one verification
    # A draft equal to its target is always accepted.
    assert Timed([chunk]).tokens_a_round == pytest.approx(chunk.tokens / long)


def recorder(calls, name, seconds=lambda: None, sizes=(2,)):
    """Other people's way, as the timer is handed it."""

    def answer(prompts, first):
        calls.append((name, first, len(prompts)))
        seconds()
        return Chunk(0.0, 1.0, [Completion(list(p), [0]) for p in prompts])

    return Way(answer, sizes=sizes)


def test_ways_take_turns_and_none_always_goes_first():
    calls = []
    ways = {name: recorder(calls, name, sizes=()) for name in ("a", "b", "c")}
    documents = [*range(8)]
    timed = time_ways(ways, PROMPTS * 2, PROMPTS, batch_size=2, documents=documents)
    assert [name for name, _, _ in calls] == [*"abc", *"bca", *"cab", *"abc"]
    assert [first for _, first, _ in calls] == [0, 0, 0, 2, 2, 2, 4, 4, 4, 6, 6, 6]
    for name in ways:
        assert [c.prompt_ids for c in timed[name].completions] == PROMPTS * 2


def test_a_warm_up_meets_every_shape_that_a_batch_may_shrink_to(clock):
    crowd = replace(SETTING, batch_size=8, captured=True)
    target = Slow(0, clock, lambda tokens: 1.0)
    assert plain(target, crowd).sizes == [8]
    assert drafted(target, target, crowd).sizes == [1, 4, 8]
    for other in (replace(crowd, captured=False), replace(crowd, captured=False, compiled=True)):
        assert drafted(target, target, other).sizes == [8]  # a graph on a CPU takes half a minute
    calls = []
    timed = time_ways({"drafted": recorder(calls, "drafted", sizes=(1, 4, 8))}, [], PROMPTS)
    assert calls == [("drafted", 0, 1), ("drafted", 0, 4), ("drafted", 0, 8)]
    assert timed["drafted"].chunks == []


def test_the_capacity_holds_every_row_that_is_timed(clock):
    target = Slow(0, clock, lambda tokens: 1.0)
    for gamma in (0, 3, 12):
        capacity = row_capacity(PROMPTS, max_new_tokens=10, gamma=gamma)
        fitting = replace(SETTING, gamma=gamma, capacity=capacity)
        way = drafted(target, target, fitting) if gamma else plain(target, fitting)
        assert way.answer(PROMPTS[2:], 0).completions
    short = drafted(target, target, replace(SETTING, capacity=12))
    with pytest.raises(ValueError, match="cache slots"):
        short.answer(PROMPTS[2:], 0)


def test_timing_ends_after_its_minutes_which_is_said(clock):
    calls, notes = [], []

    def slowly():
        clock.now += 50

    ways = {name: recorder(calls, name, slowly) for name in (PLAIN, "fast")}
    documents = [*"abcdefgh"]
    limits = {"batch_size": 2, "minutes": 3, "note": notes.append, "documents": documents}
    timed = time_ways(ways, PROMPTS * 2, PROMPTS, **limits)
    for one in timed.values():  # a turn takes 100 seconds
        assert len(one.chunks) == 2
        assert one.of_prompts([(1, 1)] * 4).documents == ["a", "b", "c", "d"]
    assert notes == ["timed 4 prompts in 3 min (evaluate.timing_minutes)"]
    notes.clear()
    time_ways(ways, PROMPTS * 2, PROMPTS, **limits | {"minutes": 7})
    assert notes == []
