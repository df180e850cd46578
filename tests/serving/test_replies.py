"""What a client is told."""

import json
import math

import pytest

from draftkit.config import SamplingConfig
from draftkit.online.buffer import Served
from draftkit.serving.answers import Job, Piece, TokenScore
from draftkit.serving.intake import Texts
from draftkit.serving.protocol import ChatRequest, CompletionRequest, Json, encode
from draftkit.serving.replies import Reply, speculation
from tests.serving.fakes import TOKENIZER, chat, chat_tokenizer, completion
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
A, B = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab")
JOB = Job(prompt_ids=[1], max_new_tokens=5, sampling=SamplingConfig())


def choice(asked: CompletionRequest | ChatRequest, *pieces: Piece) -> Json:
    """The one choice of the whole reply of these pieces."""
    (made,) = received(Reply(asked, [JOB], TEXTS).whole([pieces]))["choices"]
    return made


def scored(*scores: TokenScore) -> Json:
    """How the scores of a completion are told."""
    asked = CompletionRequest(**completion(logprobs=1))
    return choice(asked, Piece("ab", scores, "stop"))["logprobs"]


def received(value: Json) -> Json:
    """What a client makes of it."""
    return json.loads(encode(value))


def test_json_is_utf8_and_has_no_nan() -> None:
    assert encode({"a": "ü"}) == '{"a":"ü"}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": math.nan})
    assert json.loads(encode({"a": "\ud800"})) == {"a": "\ud800"}


def test_speculation_is_summed_over_choices() -> None:
    one = Served(route="a", version="v000001", rounds=4, drafted=10, accepted=6, tested=8)
    other = Served(route="a", version="v000002", rounds=2, drafted=4, accepted=0, tested=2)
    one.acceptance, other.acceptance = 7.0, 0.5
    assert speculation([one, other]) == {
        "rounds": 6,
        "drafted": 14,
        "accepted": 6,
        "acceptance_length": 2.0,
        "alpha": 0.75,
        "drafter_version": "v000001, v000002",
    }


def test_where_nothing_was_drafted_there_is_no_rate() -> None:
    found = speculation([Served(route="a", version="")])
    assert found["alpha"] is found["acceptance_length"] is None


def test_impossible_tokens_have_a_finite_log_prob() -> None:
    score = TokenScore(A, -0.1, ((A, -0.1), (B, -math.inf)))
    assert scored(score)["top_logprobs"] == [{"a": -0.1, "b": -9999.0}]
    asked = ChatRequest(**chat(logprobs=True, top_logprobs=2))
    (entry,) = choice(asked, Piece("a", (score,), "stop"))["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -9999.0]


def test_a_token_that_is_not_among_the_likeliest_is_added() -> None:
    found = scored(TokenScore(B, -3.0, ((A, -0.1),)), TokenScore(B, -2.0))
    assert found["top_logprobs"] == [{"a": -0.1, "b": -3.0}, {}]


def test_a_prompt_comes_before_its_answer_and_is_no_answer() -> None:
    """Nothing predicts its first token; what is said of it is null."""
    echoed = Piece("a", (), prompt=(TokenScore(A, None),))
    said = Piece("ab", (TokenScore(B, -2.0, ((A, -0.1),)),), "stop")
    made = Reply(CompletionRequest(**completion(logprobs=1)), [JOB], TEXTS)
    found = received(made.whole([[echoed, said]]))
    (made_of,) = found["choices"]
    assert made_of["text"] == "aab"
    assert made_of["logprobs"]["token_logprobs"] == [None, -2.0]
    assert made_of["logprobs"]["top_logprobs"] == [None, {"a": -0.1, "b": -2.0}]
    assert found["usage"]["completion_tokens"] == 1
