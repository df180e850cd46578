"""The `tokenizer.ggml.*` keys of a GGUF file: the tokenizer as llama.cpp is to rebuild it.

llama.cpp has tokenizers of its own: it takes tokens, merges and types from the file, and the rule
that splits text before any merge by a name alone. Here that name is chosen by what the tokenizer
really does, and a tokenizer that none of these rules equals is refused. Two kinds are known:

- byte-level BPE (`gpt2`): the rules of GPT-2, SmolLM, Qwen2/3 and Llama 3, with or without
  `ignore_merges`. Unicode normalisation (NFC, of Qwen) is left out, as llama.cpp has none: only
  text that is not in that form already is split otherwise.
- BPE with byte fallback, as converted from sentencepiece (`llama`): llama.cpp merges by scores, so
  each token gets that of its merge's rank. Refused where ranks and scores would differ.

Read from llama.cpp 0.5.0 (src/llama-vocab.cpp).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftkit.models.gguf_files import BYTES, CONTROL, DIGITS, GPT_2, SPLITTERS, USER_DEFINED

NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6  # other types of tokens
SPACE = "▁"
REMEDY = "no tokenizer of llama.cpp equals it"


@dataclass(frozen=True)
class Vocabulary:
    """What the file says of its tokenizer; `ids` of special tokens by their name in the keys.

    tokens, types and scores [rows]; `scores` is empty for byte-level BPE. add_prefix: whether text
    begins with a space of its own.
    """

    model: str
    splitter: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_prefix: bool = False


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, *, rows: int, ends: Sequence[int] = ()
) -> Vocabulary:
    """The keys of `tokenizer` for a model of so many `rows`; `ends`: all ids that end a text.

    Raises ValueError for a tokenizer that llama.cpp does not have.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"target.path: the tokenizer has no tokenizer.json: {REMEDY}")
    spec = json.loads(backend.to_str())
    model = spec["model"]
    plain = not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    if model["type"] != "BPE" or model.get("dropout") or not plain:
        raise ValueError(f"target.path: a tokenizer of type {model['type']}: {REMEDY}")
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    tokens, types = _tokens(tokenizer, spec["added_tokens"], rows)
    add_bos, add_eos = _added_ends(tokenizer)
    common: dict[str, Any] = {"tokens": tokens, "types": types, "ids": _ids(tokenizer, ends)}
    common |= {"add_bos": add_bos, "add_eos": add_eos}
    if model.get("byte_fallback"):
        add_prefix = _prefixes(spec)
        _retype(types, tokens, tokenizer.unk_token_id)
        scores = _scores(tokens, types, merges)
        return Vocabulary(
            "llama", "default", scores=scores, merges=[], add_prefix=add_prefix, **common
        )
    splitter = splitter_of(spec)
    lines = [" ".join(merge) for merge in merges]
    return Vocabulary("gpt2", splitter, scores=[], merges=lines, **common)


def splitter_of(spec: Mapping[str, Any]) -> str:
    """The name that llama.cpp has for the way a byte-level `spec` splits text before merges.

    spec: a tokenizer.json. Raises ValueError where it has none.
    """
    kinds = [one["type"] for one in _steps(spec["normalizer"], "normalizers")]
    steps = tuple(map(_step, _steps(spec["pre_tokenizer"], "pretokenizers")))
    whole = bool(spec["model"].get("ignore_merges"))
    name = SPLITTERS.get((steps, whole))
    if name is None or not set(kinds) <= {"NFC"}:
        shown = json.dumps(spec["pre_tokenizer"], ensure_ascii=False)[:160]
        raise ValueError(
            f"target.path: the tokenizer splits text by {shown} (normalizers {kinds}, "
            f"ignore_merges {whole}): {REMEDY}"
        )
    return name


def _steps(part: Mapping[str, Any] | None, key: str) -> list[Any]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def _step(part: Mapping[str, Any]) -> str:
    """One step of splitting, in the words of `SPLITTERS`."""
    if part["type"] == "ByteLevel" and not part["add_prefix_space"]:
        return GPT_2 if part["use_regex"] else BYTES
    if part["type"] == "Digits" and part["individual_digits"]:
        return DIGITS
    if part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        return str(part["pattern"].get("Regex", ""))
    return json.dumps(part)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, added: Sequence[Mapping[str, Any]], rows: int
) -> tuple[list[str], list[int]]:
    """Text and type of each row; those without an id are unused."""
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    tokens = [names.get(row, f"[PAD{row}]") for row in range(rows)]
    types = [NORMAL if row in names else UNUSED for row in range(rows)]
    for one in added:
        types[one["id"]] = CONTROL if one["special"] else USER_DEFINED
    return tokens, types


def _ids(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> dict[str, int]:
    """Special tokens by their key. Without one that begins a text the end's stands for it.

    llama.cpp would otherwise take id 11. It knows one `eos` and one `eot`; further ends it goes by
    their texts, such as <|im_end|>.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(ends), None)
    others = [one for one in ends if one != end]
    ids = {
        "eos": end,
        "bos": end if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        "eot": next(iter(others), None),
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: int(one) for name, one in ids.items() if isinstance(one, int)}


def _added_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether encoding puts the token of a beginning before a text, and that of an end behind."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    for begins in (False, True):
        for ends in (False, True):
            first, last = [tokenizer.bos_token_id] * begins, [tokenizer.eos_token_id] * ends
            if whole == [*first, *plain, *last]:
                return begins, ends
    raise ValueError(f"target.path: the tokenizer adds {whole} around {plain}: {REMEDY}")


# Converted from sentencepiece


def _prefixes(spec: Mapping[str, Any]) -> bool:
    """Whether the tokenizer puts a space in front of text. ValueError for other changes of it."""
    splits = _steps(spec["pre_tokenizer"], "pretokenizers")
    changes = _steps(spec["normalizer"], "normalizers")
    if not splits and changes and changes[-1]["type"] == "Replace":
        replaced = changes[-1]
        same = replaced["pattern"] == {"String": " "} and replaced["content"] == SPACE
        before = changes[:-1]
        if same and before in ([], [{"type": "Prepend", "prepend": SPACE}]):
            return bool(before)
    if len(splits) == 1 and splits[0]["type"] == "Metaspace" and not changes:
        part = splits[0]
        if part["replacement"] == SPACE and not part.get("split", True):
            return part["prepend_scheme"] != "never"
    raise ValueError(f"target.path: the tokenizer changes text by {changes or splits}: {REMEDY}")


def _retype(types: list[int], tokens: Sequence[str], unknown: int | None) -> None:
    for row, token in enumerate(tokens):
        if row == unknown:
            types[row] = UNKNOWN
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types[row] = BYTE


def _scores(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]
) -> list[float]:
    """The score of each token: minus the rank of what makes it, in the order of the merges.

    llama.cpp merges whatever two neighbours make a token, the highest score first. That is the same
    where every such pair is a merge and the merges into one token follow each other: else raises
    ValueError.
    """
    made = [name for name, _ in groupby("".join(merge) for merge in merges)]
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    pairs = {(a, b) for token in known for a, b in _halves(token) if {a, b} <= known}
    if len(made) != len(set(made)) or not pairs <= set(merges):
        raise ValueError(f"target.path: the tokenizer's merges are no sentencepiece's: {REMEDY}")
    ranks = {token: rank for rank, token in enumerate(made)}
    return [-float(ranks.get(token, len(made))) for token in tokens]


def _halves(token: str) -> Iterator[tuple[str, str]]:
    return ((token[:cut], token[cut:]) for cut in range(1, len(token)))
