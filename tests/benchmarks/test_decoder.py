"""A setting is counted, paired and predicted; peers run the same weights and lengths as we do."""

from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion
from draftkit.evaluation import walltime
from draftkit.evaluation.walltime import Chunk, Setting, Timed
from draftkit.theory.speedup import Costs
from pipelines.benchmarks.decoder import base_point, prediction
from pipelines.benchmarks.decoder_peers import PAD, generation_config, hugging_face
from tests import tiny
from tests.evaluation.scripted import plain

GREEDY = SamplingConfig(temperature=0.0)
SETTING = Setting(sampling=GREEDY, max_new_tokens=12, gamma=3, capacity=40)
CROWD, TEXTS = replace(SETTING, batch_size=3), tiny.prompts([5, 3, 8])


@pytest.fixture(scope="module")
def pair():
    return tiny.pair()


# A setting


def test_a_prediction_counts_the_rounds_of_a_batch_as_it_shrinks():
    """Of two rows, which end after two rounds and four; without proposals after 8 and 12."""
    costs = Costs(1.0, 0.1, 1.0, 0.0, {3: 1.0})

    def answer(*counts):
        return Completion([1], [0] * 10, accept_counts=[*counts], tested=1)

    plain, drafted = [answer(8), answer(12)], [answer(0, 0, 0, 2), answer(0, 0, 4, 0)]
    timed = {
        "plain": Timed([Chunk(5.0, 12.0, plain)] * 2),
        "speculative": Timed([Chunk(9.0, 6.0, drafted)] * 2, gamma=3),
    }
    found = prediction(timed["speculative"], timed["plain"], costs)
    assert found["acceptance_length"]["mean"] == pytest.approx(20 / 6)
    assert found["speedup"]["measured"] == pytest.approx(2)
    assert found["speedup"]["predicted"] == pytest.approx((20 / 4) / (20 / 12) / (3 * 0.1 + 1))
    error = found["speedup"]["measured"] / found["speedup"]["predicted"] - 1
    assert found["prediction_error"] == pytest.approx(error)


def test_rates_and_ratios_are_of_totals_and_hold_the_prefill():
    """20 chunks, with a second of prefill in every other one of ours."""
    ten, twenty = ([Completion([], [0] * tokens)] for tokens in (10, 20))
    mine = Timed([Chunk(1.0, 1.0, ten), Chunk(0.0, 3.0, ten)] * 10)
    other = Timed([Chunk(0.0, 4.0, twenty), Chunk(0.0, 1.0, ten)] * 10)
    point = base_point("plain", {"plain": mine, "hf_plain": other}, SETTING)
    assert (point["prompts"], point["chunks"], [*point["ratios"]]) == (20, 20, ["hf_plain"])
    for found, mean in ((point["tokens_per_second"], 4), (point["ratios"]["hf_plain"], 4 / 6)):
        low, high = found["ci95"]
        assert found["mean"] == pytest.approx(mean)
        assert low < mean < high


# The peers


def outputs(method, prompts, first=0):
    return [completion.output_ids for completion in method.answer(prompts, first).completions]


def test_all_ways_of_hugging_face_answer_as_our_decoder_does(pair):
    target, draft = pair
    ours = plain(target, CROWD)
    for options in ({}, {"static": True}):
        assert outputs(hugging_face(target, CROWD, **options), TEXTS) == outputs(ours, TEXTS)
    for options in ({"assistant": draft}, {"lookup": True}):
        peer = hugging_face(target, CROWD, **options)
        for prompt in TEXTS:
            assert outputs(peer, [prompt]) == outputs(ours, [prompt])


def test_answers_end_with_their_first_end_of_text_in_a_batch_too(pair):
    target, _ = pair
    free = outputs(plain(target, CROWD), TEXTS)
    ends = (free[0][4], free[1][7])
    setting = replace(CROWD, eos_token_ids=ends)
    ours = plain(target, setting).answer(TEXTS, 0).completions
    theirs = hugging_face(target, setting).answer(TEXTS, 0).completions
    assert [c.output_ids for c in theirs] == [c.output_ids for c in ours]
    assert [c.ended for c in theirs] == [c.ended for c in ours]
    assert min(len(c.output_ids) for c in theirs) < 12


def test_the_assistant_proposes_gamma_tokens_a_round(pair, monkeypatch):
    target, draft = pair
    passes = {"target": 0, "draft": 0}
    for name, adapter in (("target", target), ("draft", draft)):
        real = adapter.model.forward

        def counted(*arguments, name=name, real=real, **options):
            passes[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(adapter.model, "forward", counted)
    long = replace(CROWD, max_new_tokens=60)
    hugging_face(target, long, assistant=draft).answer(TEXTS[:1], 0)
    # the last rounds are cut by the length limit
    assert 3 * passes["target"] - 6 <= passes["draft"] <= 3 * passes["target"]
    assert passes["target"] < 60


def test_sampled_answers_repeat_by_seed(pair):
    target, _ = pair
    sampled = replace(CROWD, sampling=SamplingConfig(temperature=1.0))
    peer = hugging_face(target, sampled)
    first = outputs(peer, TEXTS)
    assert outputs(peer, TEXTS) == first
    assert outputs(peer, TEXTS, first=3) != first
    other = hugging_face(target, replace(sampled, seed=1))
    assert outputs(other, TEXTS) != first


def test_the_served_sampling_reaches_hugging_face():
    sampling = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    made = generation_config(replace(CROWD, sampling=sampling, eos_token_ids=(3, 4)))
    assert (made.do_sample, made.temperature, made.top_k, made.top_p) == (True, 0.7, 5, 0.9)
    assert made.repetition_penalty == 1.2
    assert (made.eos_token_id, made.pad_token_id, made.max_new_tokens) == ([3, 4], PAD, 12)
    assert generation_config(CROWD).do_sample is False
    assert generation_config(CROWD).eos_token_id is None


def test_all_that_a_caller_waits_for_is_in_the_time(pair, monkeypatch):
    target, _ = pair
    ticks = iter([10.0, 17.0])
    monkeypatch.setattr("pipelines.benchmarks.decoder_peers.now", lambda: next(ticks))
    monkeypatch.setattr(walltime, "now", lambda: next(ticks))
    chunk = hugging_face(target, CROWD).answer(TEXTS, 0)
    assert (chunk.prefill_seconds, chunk.seconds) == (0.0, 7.0)
