"""An engine over HTTP: the same texts as our decoder's, patience, and one line when it fails."""

import socket
from dataclasses import replace

import pytest

from draftkit.config import SamplingConfig
from draftkit.distillation import engines
from draftkit.distillation.engines import TRIES, OpenAISampler
from draftkit.distillation.samplers import DecoderSampler
from tests import tiny
from tests.distillation.serving import Engine, served

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
    waits = []
    given = {"url": engine.url, "model": "tiny", "eos_token_ids": engine.eos_token_ids}
    given |= LIMITS | {"batch_size": at_once, "wait": waits.append}
    return OpenAISampler(**given | changes), waits


def test_greedy_answers_are_those_of_the_decoder(engine, model):
    sampler, waits = sampler_of(engine)
    ends = engine.eos_token_ids
    plain = DecoderSampler(model=model, name="target", eos_token_ids=ends, **LIMITS)
    expected = plain.sample(PROMPTS, rows=range(5, 9), version="v")
    answers = sampler.sample(PROMPTS, rows=range(5, 9), version="v")
    assert answers == [replace(record, sampler="openai") for record in expected]
    assert {record.output_ids[-1] in engine.eos_token_ids for record in answers} == {True, False}
    assert waits == []


def test_every_setting_is_named_in_the_request(engine):
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    sampler, _ = sampler_of(engine, sampling=sampling)
    sampler.sample(PROMPTS[:2], rows=[7, 8], version="")
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
        sampler, _ = sampler_of(engine, eos_token_ids=ends)
        return sampler.sample(PROMPTS[1:2], rows=[0], version="v")[0].output_ids

    ends = engine.eos_token_ids
    for end in ends:
        assert answered(ends, **{name: end}) == [5, 6, end]
    assert answered(ends) == [5, 6]
    assert answered([7], **{name: None}) == [5, 6, 7]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_engine_is_asked_again_after_longer_and_longer_waits(engine, status):
    engine.failures = [status] * 3
    sampler, waits = sampler_of(engine)
    (record,) = sampler.sample(PROMPTS[:1], rows=[0], version="")
    assert record.output_ids
    assert waits == [1.0, 2.0, 4.0]
    assert len(engine.asked) == 4


def test_an_engine_that_stays_busy_is_given_up_in_one_line(engine):
    engine.failures = [503] * 99
    sampler, waits = sampler_of(engine, at_once=1)
    with pytest.raises(ValueError, match=rf"^generate\.url .*503.*{TRIES} times") as error:
        sampler.sample(PROMPTS[:1], rows=[0], version="")
    assert "\n" not in str(error.value)
    assert len(engine.asked) == TRIES == len(waits) + 1


@pytest.mark.parametrize(
    ("engine_says", "words"),
    [
        *(
            ({"failures": [status] * 99}, rf"status {status}.*not now")
            for status in (400, 401, 404)
        ),
        *(({"body": body}, "its answer is not") for body in NO_COMPLETIONS),
        ({"changes_prompts": True}, "changes prompts"),
        ({"returns_ids": False}, "it returns text without token ids"),
    ],
)
def test_a_refusal_or_no_completion_is_one_line_and_not_asked_again(engine, engine_says, words):
    vars(engine).update(engine_says)
    sampler, waits = sampler_of(engine)
    with pytest.raises(ValueError, match=rf"^generate\.url .*{words}") as error:
        sampler.sample(PROMPTS[:1], rows=[0], version="")
    assert "\n" not in str(error.value)
    assert waits == []


def test_nobody_at_the_address_is_one_line_after_all_tries():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        nobody = Engine(None, [0], TOKENIZER.decode)
        nobody.url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        sampler, waits = sampler_of(nobody)
        with pytest.raises(ValueError, match=r"^generate\.url .*ConnectError") as error:
            sampler.sample(PROMPTS[:1], rows=[0], version="")
    assert "\n" not in str(error.value)
    assert len(waits) == TRIES - 1


def test_a_broken_address_is_one_line():
    nobody = Engine(None, [0], TOKENIZER.decode)
    nobody.url = "http://127.0.0.1:port/v1"
    with pytest.raises(ValueError, match=r"^generate\.url http://127\.0\.0\.1:port/v1: "):
        sampler_of(nobody)[0].sample(PROMPTS[:1], rows=[0], version="")


def test_the_key_is_sent_and_never_shown(engine):
    sampler, _ = sampler_of(engine, key="secret")
    (record,) = sampler.sample(PROMPTS[:1], rows=[0], version="")
    assert engine.keys == ["Bearer secret"]
    assert "secret" not in repr(sampler) + repr(record)
    sampler_of(engine)[0].sample(PROMPTS[:1], rows=[0], version="")
    assert engine.keys[1] is None


def test_no_more_requests_are_under_way_than_allowed(engine, monkeypatch):
    pools = []
    real = engines.ThreadPoolExecutor
    monkeypatch.setattr(
        engines, "ThreadPoolExecutor", lambda count: pools.append(count) or real(count)
    )
    sampler_of(engine, at_once=2)[0].sample(PROMPTS, rows=range(4), version="")
    assert pools == [2]
