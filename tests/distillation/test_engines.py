"""An engine over HTTP: the same texts as our decoder's, patience, and one line when it fails."""

from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.distillation.remote import RETRIES
from draftkit.distillation.samplers import DecoderSampler, RemoteSampler
from tests import tiny
from tests.distillation.serving import Engine, remote, served

GREEDY = SamplingConfig(temperature=0.0)
TOKENIZER = tiny.byte_tokenizer()
PROMPTS = [TOKENIZER.encode(text) for text in ("Once upon a time", "x", "def f(", "1 + 1 =")]
NO_COMPLETIONS = [b"<html>", {"choices": []}, {"choices": [{}]}, {"error": "no"}, [1, 2]]
LIMITS = {"sampling": GREEDY, "max_new_tokens": 12, "max_length": 24, "batch_size": 4, "seed": 3}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def model():
    return tiny.adapter(num_hidden_layers=1)


@pytest.fixture(scope="module")
def ends(model):
    """A token that some greedy answers reach and others do not, besides the tokenizer's own."""
    sampler = DecoderSampler(model=model, name="target", eos_token_ids=[], **LIMITS)
    answers = sampler.sample(PROMPTS, rows=range(4), version="")
    return [answers[0].output_ids[6], TOKENIZER.eos_token_id]


@pytest.fixture
def engine(model, ends):
    with served(Engine(model, ends, TOKENIZER.decode)) as running:
        yield running


def sampler_of(engine, at_once=3, **changes):
    given = {"target": remote(engine), "eos_token_ids": engine.eos_token_ids}
    return RemoteSampler(**given | LIMITS | {"batch_size": at_once} | changes)


def test_greedy_answers_are_those_of_the_decoder(engine, model):
    sampler = sampler_of(engine)
    ends = engine.eos_token_ids
    plain = DecoderSampler(model=model, name="target", eos_token_ids=ends, **LIMITS)
    expected = plain.sample(PROMPTS, rows=range(5, 9), version="v")
    answers = sampler.sample(PROMPTS, rows=range(5, 9), version="v")
    assert answers == [replace(record, sampler="openai") for record in expected]
    assert {record.output_ids[-1] in engine.eos_token_ids for record in answers} == {True, False}
    assert len(engine.asked) == len(PROMPTS)


def test_every_setting_is_named_in_the_request(engine):
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    sampler_of(engine, sampling=sampling).sample(PROMPTS[:2], rows=[7, 8], version="")
    asked = {tuple(request["prompt"]): request for request in engine.asked}
    first, second = (asked[tuple(prompt)] for prompt in PROMPTS[:2])
    assert first["max_tokens"] == min(12, 24 - len(PROMPTS[0]))
    assert (first["temperature"], first["top_p"], first["top_k"]) == (0.7, 0.9, -1)
    assert (first["repetition_penalty"], first["min_p"], first["model"]) == (1.1, 0.0, "tiny")
    assert first["seed"] != second["seed"]
    assert first["return_token_ids"]


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_the_end_that_an_engine_leaves_out_is_the_one_it_names(engine, name):
    """And where nobody says which of two ends it was, there is none; one alone needs no name."""

    def answered(ends, **said):
        choice = {"text": " ok", "finish_reason": "stop", "token_ids": [5, 6], **said}
        engine.body = {"choices": [choice]}
        sampler = sampler_of(engine, eos_token_ids=ends)
        return sampler.sample(PROMPTS[1:2], rows=[0], version="v")[0].output_ids

    ends = engine.eos_token_ids
    for end in ends:
        assert answered(ends, **{name: end}) == [5, 6, end]
    assert answered(ends) == [5, 6]
    assert answered([7], **{name: None}) == [5, 6, 7]


def test_a_busy_engine_is_asked_again(engine):
    engine.failures = [503] * RETRIES
    (record,) = sampler_of(engine).sample(PROMPTS[:1], rows=[0], version="")
    assert record.output_ids
    assert len(engine.asked) == 1 + RETRIES


@pytest.mark.parametrize(
    ("engine_says", "words"),
    [
        ({"failures": [400]}, "status 400: .*not now"),
        *(({"body": body}, "answers with no completion") for body in NO_COMPLETIONS),
        ({"changes_prompts": True}, "changes prompts"),
        ({"returns_ids": False}, "returns text without token ids"),
    ],
)
def test_a_refusal_or_no_completion_is_one_line_and_not_asked_again(engine, engine_says, words):
    vars(engine).update(engine_says)
    with pytest.raises(ValueError, match=rf"^target\.urls: .*{words}") as error:
        sampler_of(engine).sample(PROMPTS[:1], rows=[0], version="")
    assert "\n" not in str(error.value)
    assert len(engine.asked) == 1
