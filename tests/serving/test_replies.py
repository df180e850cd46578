"""What a client is told."""

import json
import math

import pytest

from draftkit.config import SamplingConfig
from draftkit.online.buffer import Served
from draftkit.serving.jobs import Job, Piece, TokenScore
from draftkit.serving.protocol import Json, encode
from draftkit.serving.replies import ChatReply, CompletionReply, speculative
from draftkit.serving.texts import Texts
from tests.serving.fakes import TOKENIZER, chat_tokenizer
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
A, B = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab")


def reply(
    kind: type[CompletionReply] = CompletionReply,
    *scores: TokenScore,
    streams: bool = False,
) -> CompletionReply:
    """A reply of one choice, for which "ab" with `scores` has come."""
    job = Job(prompt_ids=[1], max_new_tokens=5, sampling=SamplingConfig())
    made = kind(
        texts=TEXTS,
        model="m",
        jobs=[job],
        prompt_tokens=1,
        has_logprobs=True,
        streams=streams,
        tells_usage=(False, False),
    )
    made.push(0, Piece("ab", scores))
    return made


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
    assert speculative([one, other]) == {
        "rounds": 6,
        "drafted": 14,
        "accepted": 6,
        "acceptance_length": 2.0,
        "alpha": 0.75,
        "drafter_version": "v000001, v000002",
    }


def test_where_nothing_was_drafted_there_is_no_rate() -> None:
    found = speculative([Served(route="a", version="")])
    assert found["alpha"] is found["acceptance_length"] is None


def test_impossible_tokens_have_a_finite_log_prob() -> None:
    score = TokenScore(A, -0.1, ((A, -0.1), (B, -math.inf)))
    found = received(reply(CompletionReply, score).response())["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"a": -0.1, "b": -9999.0}]
    (made,) = received(reply(ChatReply, score).response())["choices"]
    (entry,) = made["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -9999.0]


def test_a_token_that_is_not_among_the_likeliest_is_added() -> None:
    scores = [TokenScore(B, -3.0, ((A, -0.1),)), TokenScore(B, -2.0)]
    found = received(reply().scored(scores))
    assert found["top_logprobs"] == [{"a": -0.1, "b": -3.0}, {}]


def test_a_prompt_comes_before_its_answer_and_is_no_answer() -> None:
    """Nothing predicts its first token; what is said of it is null."""
    made = reply(CompletionReply, TokenScore(B, -2.0, ((A, -0.1),)))
    echoed = Piece("a", (), prompt=(TokenScore(A, None),))
    made.pieces[0].insert(0, echoed)
    found = received(made.response())
    choice = found["choices"][0]
    assert choice["text"] == "aab"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": -0.1, "b": -2.0}]
    assert found["usage"]["completion_tokens"] == 1


def test_a_stream_keeps_nothing_that_it_has_sent() -> None:
    kept = reply(CompletionReply, TokenScore(A, -1.0))
    sent = reply(CompletionReply, TokenScore(A, -1.0), streams=True)
    assert (kept.tokens, len(kept.pieces[0])) == (1, 1)
    assert (sent.tokens, sent.pieces) == (1, [[]])
