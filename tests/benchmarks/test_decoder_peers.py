"""The peers run the same weights, the same lengths, and are counted as we are."""

from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.evaluation import walltime
from draftkit.evaluation.walltime import Setting, decoding
from pipelines.benchmarks.decoder_peers import PAD, generation_config, hugging_face
from tests import tiny

SETTING = Setting(
    sampling=SamplingConfig(temperature=0.0),
    max_new_tokens=12,
    gamma=3,
    verification="speculative",
    batch_size=3,
    capacity=40,
    eos_token_ids=(),
    seed=0,
    compiled=False,
)
PROMPTS = tiny.prompts([5, 3, 8])


@pytest.fixture(scope="module")
def pair():
    return tiny.pair()


def outputs(method, prompts, first=0):
    return [completion.output_ids for completion in method(prompts, first).completions]


def test_plain_assisted_and_lookup_answer_as_our_decoder_does(pair):
    target, draft = pair
    ours = decoding(target, None, SETTING)
    assert outputs(hugging_face(target, SETTING), PROMPTS) == outputs(ours, PROMPTS)
    for options in ({"assistant": draft}, {"lookup": True}):
        peer = hugging_face(target, SETTING, **options)
        for prompt in PROMPTS:
            assert outputs(peer, [prompt]) == outputs(ours, [prompt])


def test_answers_end_with_their_first_end_of_text_in_a_batch_too(pair):
    target, _ = pair
    free = outputs(decoding(target, None, SETTING), PROMPTS)
    ends = (free[0][4], free[1][7])
    setting = replace(SETTING, eos_token_ids=ends)
    ours = decoding(target, None, setting)(PROMPTS, 0).completions
    theirs = hugging_face(target, setting)(PROMPTS, 0).completions
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
    long = replace(SETTING, max_new_tokens=60)
    hugging_face(target, long, assistant=draft)(PROMPTS[:1], 0)
    # the last rounds are cut by the length limit
    assert 3 * passes["target"] - 6 <= passes["draft"] <= 3 * passes["target"]
    assert passes["target"] < 60


def test_sampled_answers_repeat_by_seed(pair):
    target, _ = pair
    sampled = replace(SETTING, sampling=SamplingConfig(temperature=1.0))
    peer = hugging_face(target, sampled)
    first = outputs(peer, PROMPTS)
    assert outputs(peer, PROMPTS) == first
    assert outputs(peer, PROMPTS, first=3) != first
    other = hugging_face(target, replace(sampled, seed=1))
    assert outputs(other, PROMPTS) != first


def test_the_served_sampling_reaches_hugging_face():
    sampling = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    made = generation_config(replace(SETTING, sampling=sampling, eos_token_ids=(3, 4)))
    assert (made.do_sample, made.temperature, made.top_k, made.top_p) == (True, 0.7, 5, 0.9)
    assert made.repetition_penalty == 1.2
    assert (made.eos_token_id, made.pad_token_id, made.max_new_tokens) == ([3, 4], PAD, 12)
    assert generation_config(SETTING).do_sample is False
    assert generation_config(SETTING).eos_token_id is None


def test_all_that_a_caller_waits_for_is_in_the_time(pair, monkeypatch):
    target, _ = pair
    ticks = iter([10.0, 17.0])
    monkeypatch.setattr("pipelines.benchmarks.decoder_peers.now", lambda: next(ticks))
    monkeypatch.setattr(walltime, "now", lambda: next(ticks))
    chunk = hugging_face(target, SETTING)(PROMPTS, 0)
    assert (chunk.prefill_seconds, chunk.seconds) == (0.0, 7.0)
