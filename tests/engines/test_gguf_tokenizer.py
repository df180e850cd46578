"""A tokenizer is written for llama.cpp by what it does, or refused."""

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftkit.models.gguf_files import LLAMA_3, QWEN
from tests.engines import making
from tests.engines.gguf_tokenizer import Vocabulary, splitter_of, vocabulary_of

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"


def spec_of(pre_tokenizer: Any, *, normalizer: Any = None, whole: bool = False) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return json.loads(tokenizer.to_str())


def split(pattern: str) -> Any:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, BYTES])


def test_the_rule_is_named_by_what_the_tokenizer_does() -> None:
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])
    assert splitter_of(spec_of(GPT_2)) == "gpt-2"
    assert splitter_of(spec_of(digits)) == "smollm"
    assert splitter_of(spec_of(split(QWEN), normalizer=normalizers.NFC())) == "qwen2"
    assert splitter_of(spec_of(split(LLAMA_3), whole=True)) == "llama-bpe"
    assert splitter_of(spec_of(split(LLAMA_3))) == "smaug-bpe"


def test_the_rule_of_qwen_is_what_transformers_has() -> None:
    from transformers import Qwen2Tokenizer

    made = Qwen2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])
    spec = json.loads(made.backend_tokenizer.to_str())
    assert splitter_of(spec) == "qwen2"


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(split(QWEN.replace("{N}", "{N}{1,2}"))),
        spec_of(split(QWEN), whole=True),
        spec_of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        spec_of(pre_tokenizers.Sequence([pre_tokenizers.Digits(), GPT_2])),
        spec_of(GPT_2, normalizer=normalizers.Lowercase()),
        spec_of(pre_tokenizers.Whitespace()),
    ],
)
def test_a_rule_that_llama_cpp_does_not_have_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^target\.path: the tokenizer splits text by .*llama.cpp equals it$"
    ):
        splitter_of(spec)


def wrapped(**special: Any) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(making.tokenizer().backend_tokenizer), **special
    )
    template = " ".join(filter(None, [special.get("bos_token"), "$A", special.get("behind")]))
    pairs = [
        (token, made.convert_tokens_to_ids(token)) for token in template.split() if token != "$A"
    ]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(dict.fromkeys(pairs))
    )
    return made


def test_the_ends_that_encoding_adds_are_written() -> None:
    ends = {"bos_token": BEGIN, "eos_token": END}
    plain = vocabulary_of(making.tokenizer(), rows=making.REAL)
    first = vocabulary_of(wrapped(**ends), rows=making.REAL + 2, ends=[1, 2])
    both = vocabulary_of(wrapped(**ends, behind=END), rows=making.REAL + 2)
    assert [(v.add_bos, v.add_eos) for v in (plain, first, both)] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    begin, end = making.REAL, making.REAL + 1
    assert first.ids == {"bos": begin, "eos": end, "eot": 1}
    assert plain.ids == {"bos": 0, "eos": 0, "pad": 0}
    assert first.types[begin] == first.types[end] == 3
    with pytest.raises(ValueError, match=r"^target\.path: the tokenizer adds"):
        vocabulary_of(wrapped(**ends, behind=BEGIN), rows=making.REAL + 2)


def sentencepiece(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Letters of "▁abc" and the merges of them, as transformers converts sentencepiece."""
    tokens = [UNKNOWN, BEGIN, END, "<0x0A>", *"▁abc"]
    tokens += dict.fromkeys(a + b for a, b in merges)
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Replace("▁", " ")
    ends = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends)


def merged(vocabulary: Vocabulary, text: str) -> list[str]:
    """What llama.cpp makes of `text`: of neighbours that make a token those of the best score."""
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    parts = list("▁" * vocabulary.add_prefix + text.replace(" ", "▁"))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [pair for pair in pairs if pair[0] is not None]
        if not known:
            return parts
        at = -max(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_scores_of_a_sentencepiece_merge_as_the_ranks_do() -> None:
    tokenizer = sentencepiece(
        [("▁", "a"), ("b", "c"), ("▁a", "bc"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    )
    with pytest.raises(ValueError, match="merges are no sentencepiece's"):
        vocabulary_of(tokenizer, rows=16)  # "▁abc" is also "▁" and "abc"
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc"), ("▁a", "b"), ("▁ab", "c")]
    with pytest.raises(ValueError, match="merges are no sentencepiece's"):
        vocabulary_of(sentencepiece(merges), rows=16)  # "▁abc" has two ranks apart
    merges = [("▁", "a"), ("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    tokenizer = sentencepiece(merges)
    vocabulary = vocabulary_of(tokenizer, rows=16)
    assert vocabulary.model == "llama"
    assert vocabulary.add_prefix
    assert vocabulary.types == [2, 3, 3, 6] + [1] * 8 + [5] * 4
    for text in ("abc", "a abc bcab", "cabcab", "b"):
        assert merged(vocabulary, text) == tokenizer.tokenize(text)


def test_other_models_are_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match=r"^target\.path: a tokenizer of type WordLevel: no token"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words), rows=1)
