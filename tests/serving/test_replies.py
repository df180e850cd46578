"""What a client is told."""

import json
import math
from collections.abc import Iterator

import pytest

from draftkit.serving.jobs import Piece, Speculation, TokenScore
from draftkit.serving.replies import (
    ChatForm,
    Choice,
    CompletionForm,
    speculative,
)
from draftkit.serving.texts import Offsets, Texts
from draftkit.serving.wire import Json, bits, encode
from tests.serving.fakes import TOKENIZER, chat_tokenizer
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
A, B = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab")


def choice(*scores: TokenScore, keeps: bool = True) -> Choice:
    found = Choice(0, Offsets(TEXTS), keeps=keeps)
    found.push(Piece("ab", scores))
    return found


def received(value: Json) -> Json:
    """What a client makes of it."""
    return json.loads(encode(value))


def test_json_is_utf8_and_has_no_nan() -> None:
    assert encode({"a": "ü"}) == '{"a":"ü"}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": math.nan})
    assert json.loads(encode({"a": "\ud800"})) == {"a": "\ud800"}


def test_json_in_bits_is_what_the_library_writes() -> None:
    plain = {"a": [1, -2.5, None, True, "ü\n\u2028"], "b": {"c": [], "d": {}}, "e": [[{"f": "g"}]]}
    whole = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    assert "".join(bits(plain)) == whole
    made: list[int] = []

    def entries() -> Iterator[Json]:
        for number in range(3):
            made.append(number)
            yield {"entry": [number]}

    lazy = bits({"first": iter([]), "then": entries()})
    assert next(bit for bit in lazy if "entry" in bit) == '{"entry":[0]}'
    assert made == [0]  # no entry is made before it is wanted
    assert "".join(lazy) == ',{"entry":[1]},{"entry":[2]}]}'


def test_speculation_is_summed_over_choices() -> None:
    one = Speculation(4, 10, 6, 8, 7.0, "v000001")
    other = Speculation(2, 4, 0, 2, 0.5, "v000002")
    assert speculative([one, other]) == {
        "rounds": 6,
        "drafted": 14,
        "accepted": 6,
        "acceptance_length": 2.0,
        "alpha": 0.75,
        "drafter_version": "v000001, v000002",
    }


def test_where_nothing_was_drafted_there_is_no_rate() -> None:
    found = speculative([Speculation(0, 0, 0, 0, 0.0, "")])
    assert found["alpha"] is found["acceptance_length"] is None


def test_impossible_tokens_have_a_finite_log_prob() -> None:
    score = TokenScore(A, -0.1, ((A, -0.1), (B, -math.inf)))
    form = CompletionForm(TEXTS, model="m", name="n", logprobs=True)
    found = received(form.response([choice(score)], {}))["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"a": -0.1, "b": -9999.0}]
    content = ChatForm(TEXTS, model="m", name="n", logprobs=True)
    (made,) = received(content.response([choice(score)], {}))["choices"]
    (entry,) = made["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -9999.0]


def test_a_token_that_is_not_among_the_likeliest_is_added() -> None:
    form = CompletionForm(TEXTS, model="m", name="n", logprobs=True)
    scores = [TokenScore(B, -3.0, ((A, -0.1),)), TokenScore(B, -2.0)]
    found = received(form.scored(scores, Offsets(TEXTS)))
    assert found["top_logprobs"] == [{"a": -0.1, "b": -3.0}, {}]


def test_a_stream_keeps_nothing_that_it_has_sent() -> None:
    kept, sent = choice(TokenScore(A, -1.0)), choice(TokenScore(A, -1.0), keeps=False)
    assert (kept.tokens, kept.text, len(kept.scores)) == (1, ["ab"], 1)
    assert (sent.tokens, sent.text, sent.scores) == (1, [], [])


def test_no_log_probs_unless_they_are_wanted() -> None:
    form = ChatForm(TEXTS, model="m", name="n", logprobs=False)
    assert form.response([choice(TokenScore(A, -1.0))], {})["choices"][0]["logprobs"] is None
    chunk = form.piece(choice(), Piece("a", (TokenScore(A, -1.0),)))
    assert chunk["choices"][0] == {
        "index": 0,
        "delta": {"content": "a"},
        "logprobs": None,
        "finish_reason": None,
    }
