"""Tokenizers whose decoder drops the first space of a text, as Llama 2's: an answer keeps its own.

Its text is what it adds to the prompt's; a chat's answer is a text of its own.
"""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.serving.fakes import FakeEngine, ask, chat, completion, events, serving

WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁there", "▁was", "▁"]
SAID = ["▁time", "▁there", "▁was"]


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Words with the space before them, an opening token, and one space stripped from a text."""
    vocabulary = [("<unk>", -9.0), ("<s>", -9.0), *((word, 0.0) for word in WORDS)]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


TOKENIZER = llama_tokenizer()
SAID_IDS: list[int] = TOKENIZER.convert_tokens_to_ids(SAID)


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    engine = FakeEngine(said=SAID_IDS * 9, decode=decode, per_round=1)
    with serving(engine, tokenizer=TOKENIZER) as found:
        yield found


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_answer_goes_on_from_its_prompt(address: str, as_ids: bool) -> None:
    prompt = TOKENIZER("Once upon a")["input_ids"] if as_ids else "Once upon a"
    whole = ask(
        address, "/v1/completions", completion(prompt=prompt, max_tokens=3, logprobs=0)
    ).json
    (choice,) = whole["choices"]
    assert choice["text"] == " time there was"
    assert choice["logprobs"]["tokens"] == [" time", " there", " was"]
    body = completion(prompt=prompt, max_tokens=3, stream=True)
    chunks = [c["choices"][0] for c in events(ask(address, "/v1/completions", body).body)[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == " time there was"


def test_the_answer_of_a_chat_is_a_text_of_its_own(address: str) -> None:
    message = {"role": "user", "content": "Once upon a"}
    made = ask(
        address, "/v1/chat/completions", chat(messages=[message], max_tokens=3, logprobs=True)
    ).json
    assert made["choices"][0]["message"]["content"] == "time there was"
    body = chat(messages=[message], max_tokens=3, stream=True)
    chunks = events(ask(address, "/v1/chat/completions", body).body)[:-1]
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(parts) == "time there was"
