"""Bits a byte and max p, by domain, against the same sums token by token in float64."""

import math

import pytest
import torch

from draftkit.data.prompts import Example
from draftkit.evaluation.compression import score_texts
from draftkit.models.adapter import CausalAdapter
from tests import tiny

TOKENIZER = tiny.byte_tokenizer()


def example(text: str, domain: str, *, end: bool = False) -> Example:
    ids = TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] * end
    return Example(ids, [True] * len(ids), "", domain)


def test_sums_over_windows_of_unequal_length_are_those_of_each_token() -> None:
    model = tiny.model("llama", seed=1).double()
    examples = [
        example("def f(x):", "python"),
        example("a", "prose"),  # one token: nothing is predicted
        example("the bytes of caf\u00e9 are twelve", "prose", end=True),
        example("return 1", "python", end=True),
    ]
    adapter = CausalAdapter(model, vocab_size=len(TOKENIZER))
    scores = score_texts(adapter, TOKENIZER, examples, batch_size=3)
    assert list(scores) == ["prose", "python"]
    for domain, score in scores.items():
        bits, sure, tokens, size = 0.0, 0.0, 0, 0
        for one in (e for e in examples if e.domain == domain):
            ids = torch.tensor(one.token_ids)
            with torch.inference_mode():
                probs = model(input_ids=ids[None]).logits[0].double().softmax(-1)
            for at in range(len(ids) - 1):
                bits -= math.log2(float(probs[at, ids[at + 1]]))
                sure += float(probs[at].max())
                tokens += 1
                size += int(ids[at + 1]) != TOKENIZER.eos_token_id  # a token of this one is a byte
        assert score.tokens == tokens
        assert score.bits_per_byte == pytest.approx(bits / size, rel=1e-6)
        assert score.argmax_probability == pytest.approx(sure / tokens, rel=1e-6)
