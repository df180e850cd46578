"""What benchmarks and harnesses send, as they send it, and what they read of the answers.

vLLM's `bench serve` (0.32), lm-eval (0.4.13), GuideLLM (0.8.1). `tests/engines/test_clients.py`
runs the first two.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftkit.serving.engine import Engine
from tests.serving import running
from tests.serving.fakes import NAME, TOKENIZER, Reply, ask, events, serving

PROMPT, REST = "def add(a, b):", " return"
IDS: list[int] = TOKENIZER(PROMPT + REST)["input_ids"]
NEW = 12
# The likeliest token ends texts, unless a request ignores that.
END = int(
    running.TARGET.model(torch.tensor([TOKENIZER(PROMPT)["input_ids"]])).logits[0, -1].argmax()
)
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TURN = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
VLLM = {
    "model": NAME,
    "prompt": PROMPT,
    "repetition_penalty": 1.0,
    "max_tokens": NEW,
    "logprobs": None,
    **STREAM,
    "ignore_eos": True,
}
VLLM_OPTIONS = {"top_p": 0.9, "top_k": 20, "min_p": 0.0, "temperature": 0.0} | {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.1,
}
VLLM_CHAT = {"model": NAME, "messages": TURN, "max_completion_tokens": NEW} | STREAM
GUIDELLM_STREAM = STREAM["stream_options"] | {"continuous_usage_stats": True}  # type: ignore[operator]
GUIDELLM = {"model": NAME, "stream": True, "stream_options": GUIDELLM_STREAM} | {
    "stop": None,
    "ignore_eos": True,
}
LM_EVAL = {"model": NAME, "max_tokens": NEW, "temperature": 0, "stop": ["\n\n", "</s>"], "seed": 1}
LM_EVAL_SCORES = {"model": NAME, "temperature": 0, "max_tokens": 1, "logprobs": 1} | {
    "seed": 1234,
    "echo": True,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running.serving(eos=[END]) as found:
        yield found


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


def post(address: str, body: dict[str, Any]) -> Reply:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = ask(address, path, body)
    assert reply.status == 200, reply.error
    return reply


@pytest.mark.parametrize(
    "body",
    [
        VLLM,
        VLLM | VLLM_OPTIONS | {"logprobs": 2, "prompt": IDS},
        VLLM_CHAT | {"ignore_eos": True, "min_p": 0.0},
        GUIDELLM | {"prompt": PROMPT, "max_tokens": NEW},
        GUIDELLM | {"messages": TURN, "max_completion_tokens": NEW},
    ],
)
def test_a_benchmark_gets_as_many_tokens_as_it_asks_for(address: str, body: dict[str, Any]) -> None:
    """An end of text does not end them; the usage is a chunk without choices, at the end."""
    *chunks, last, done = events(post(address, body).body)
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], NEW)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    wanted = body["stream_options"].get("continuous_usage_stats")
    assert (len(counts), counts) == (
        len(chunks) - ("messages" in body) if wanted else 0,
        sorted(counts),
    )


def test_an_end_of_text_that_is_not_ignored_ends_the_answer(address: str) -> None:
    body = {**VLLM, "temperature": 0, "stream": False, "stream_options": None}
    whole, cut = (
        post(address, body | {"ignore_eos": ignores, "logprobs": 0}).json["choices"][0]
        for ignores in (True, False)
    )
    assert (whole["finish_reason"], cut["finish_reason"]) == ("length", "stop")
    assert len(whole["logprobs"]["tokens"]) == NEW > len(cut["logprobs"]["tokens"]) == 1


@pytest.mark.parametrize("prompt", [PROMPT, [IDS], [PROMPT, PROMPT + REST], [IDS, IDS[:4]]])
def test_a_harness_generates(address: str, prompt: Any) -> None:
    made = post(address, LM_EVAL | {"prompt": prompt}).json
    count = 1 if isinstance(prompt, str) else len(prompt)
    assert [choice["index"] for choice in made["choices"]] == [*range(count)]
    assert all(isinstance(choice["text"], str) for choice in made["choices"])


def test_a_harness_chats(address: str) -> None:
    turns = [{"role": "user", "content": PROMPT, "type": "text"}]
    made = post(address, LM_EVAL | {"messages": turns}).json
    assert isinstance(made["choices"][0]["message"]["content"], str)


@pytest.mark.parametrize("prompt", [[IDS], PROMPT + REST])
def test_a_harness_reads_the_likelihood_of_a_continuation(address: str, prompt: Any) -> None:
    """As it computes it: the scores from the context's end on, but for the token that was made."""
    (choice,) = post(address, LM_EVAL_SCORES | {"prompt": prompt}).json["choices"]
    context = len(PROMPT)
    scores = choice["logprobs"]["token_logprobs"]
    own = running.TARGET.model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    expected = own[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    assert scores[0] is choice["logprobs"]["top_logprobs"][0] is None
    assert scores[1:-1] == pytest.approx(expected, abs=1e-4)
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context:-1]]
    likeliest = own[context - 1 : -1].amax(-1).tolist()
    assert best == pytest.approx(likeliest, abs=1e-4)
    assert choice["text"].startswith(PROMPT + REST)
    assert len(scores) == len(choice["logprobs"]["tokens"]) == len(IDS) + 1


@pytest.mark.parametrize("streams", [True, False])
def test_a_prompt_is_scored_without_an_answer(address: str, engine: Engine, streams: bool) -> None:
    before = engine.counters().generated_tokens
    body = LM_EVAL_SCORES | {"prompt": PROMPT, "max_tokens": 0, "stream": streams}
    reply = post(address, body)
    made = events(reply.body)[:-1] if streams else [reply.json]
    parts = [part["choices"][0] for part in made]
    assert "".join(part["text"] for part in parts) == PROMPT
    assert sum(len(part["logprobs"]["token_logprobs"]) for part in parts) == len(PROMPT)
    assert parts[-1]["finish_reason"] == "length"
    assert engine.counters().generated_tokens == before
    if not streams:
        assert made[0]["usage"]["completion_tokens"] == 0
