"""Rows to token ids: where the prompt ends, what carries loss, which split an example is in.

`messages` go through the tokenizer's chat template. `prompt` and `completion` are tokenised apart,
as a server sees them, and the completion ends with EOS. A `text` is cut into windows of
`data.max_length` tokens, each with its first `data.prompt_tokens` as the prompt.

The loss mask is explicit: nothing is inferred later from padding or special ids. This module does
not know models, batches or losses.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config import DataConfig
from draftkit.data.corpora import SPLITS, Document, setting, split_documents
from draftkit.data.store import ORDER, Picked, Stored, hash_order, write_rows

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates print today's date; with this one the same rows give the same tokens every day.
DATE_MACRO = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}{{ '' }}"
SHORT_WINDOW = 8  # tokens after the prompt below which the rest of a text is not worth a row
DOCUMENTS = 256  # tokenised together
ABOUT = "splits.json"  # beside their files: what is known of them
UNSORTED = "unsorted.arrow"
SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("document", pa.string()),
        ("domain", pa.string()),
    ]
)
COUNTS = (
    "documents",
    "documents_dropped",  # too short: no prompt, or nothing after it
    "rows_dropped",  # longer than data.max_length, where data.overlong=drop
    "prompts_cut",  # on the left, to data.max_length - 1 tokens
    "completions_cut",
    "turns_without_loss",  # of chats, where the template rewrites a turn once it is history
)

Piece = tuple[list[int], list[int], list[bool]]  # prompt, the tokens after it, which carry loss


@dataclass(frozen=True)
class Example:
    """Token ids of prompt and completion; the mask marks the tokens to learn, all after it."""

    token_ids: list[int]
    loss_mask: list[bool]
    document: str
    domain: str

    @property
    def has_completion(self) -> bool:
        """False for a prompt alone: sources that sample can use it, `source=fixed` cannot."""
        return True in self.loss_mask

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first that carries loss; all of a prompt alone."""
        return (
            self.token_ids[: self.loss_mask.index(True)] if self.has_completion else self.token_ids
        )


@dataclass(frozen=True)
class Splits:
    """Examples by split, each in hash order: any first n are a fair sample of documents."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    sha256: str  # of token ids and masks, in order
    counts: dict[str, int]  # examples by split, and COUNTS


def make_splits(
    documents: Sequence[Document],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> Splits:
    """Split and tokenise `documents`, those of `data`; the examples go to files in `folder`.

    Every example has 1 to `data.max_length` tokens, of which the first is prompt. Raises
    ValueError, one line, for rows that cannot be used and for a split without a usable row.
    """
    counts: Counter[str] = Counter(documents=len(documents))
    digest = hashlib.sha256()
    for split, members in split_documents(documents, data).items():
        examples = _in_hash_order(members, folder / UNSORTED, tokenizer, data, counts)
        if not examples:
            raise ValueError(
                f"{setting(data)}: no row of the {split} split is usable, all {len(members)} are "
                "too short; lower data.prompt_tokens or give more text"
            )
        write_rows(folder / f"{split}.arrow", SCHEMA, map(vars, examples))
        counts[split] = len(examples)
        digest.update(split.encode())
        for example in Stored(folder / f"{split}.arrow", Example):
            digest.update(np.asarray([len(example.token_ids), *example.token_ids], "<i8").tobytes())
            digest.update(np.asarray(example.loss_mask, bool).tobytes())
        remove(folder / UNSORTED)
    numbers = {name: counts[name] for name in (*SPLITS, *COUNTS)}
    write_json(folder / ABOUT, {"sha256": digest.hexdigest(), "counts": numbers})
    return read_splits(folder)


def read_splits(folder: Path) -> Splits:
    """What `make_splits` left in `folder`, mapped into memory."""
    parts = {split: Stored(folder / f"{split}.arrow", Example) for split in SPLITS}
    about: dict[str, Any] = read_json(folder / ABOUT)
    return Splits(**parts, sha256=about["sha256"], counts=about["counts"])


def _in_hash_order(
    documents: Sequence[Document],
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    counts: Counter[str],
) -> Sequence[Example]:
    """The examples of `documents`, through the file `path`; their keys alone are in memory."""
    keys = bytearray()

    def examples() -> Iterator[dict[str, Any]]:
        for start in range(0, len(documents), DOCUMENTS):
            batch = list(documents[start : start + DOCUMENTS])
            for windows in _examples(batch, tokenizer, data, counts):
                for window, example in enumerate(windows):
                    keys.extend(hash_order(f"{example.document} {window}"))
                    yield vars(example)

    write_rows(path, SCHEMA, examples())
    return Picked(Stored(path, Example), np.argsort(np.frombuffer(keys, ORDER), kind="stable"))


def to_examples(
    document: Document, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> list[Example]:
    """Tokenise one document: none if it is too short, several for a long text."""
    return _examples([document], tokenizer, data, Counter())[0]


def _examples(
    documents: list[Document],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    counts: Counter[str],
) -> list[list[Example]]:
    """The examples of each document; the texts are tokenised together, which is fast."""
    rows = [document.row for document in documents if "messages" not in document.row]
    # Source code names special tokens; in installed text these are words, not control.
    literal = data.name == "installed"
    openings = [row["text"] if "text" in row else row["prompt"] for row in rows]
    opening = iter(_tokens(tokenizer, openings, special=True, literal=literal))
    completions = [row["completion"] for row in rows if "completion" in row]
    completion = iter(_tokens(tokenizer, completions, special=False, literal=literal))
    examples: list[list[Example]] = []
    for document in documents:
        if "messages" in document.row:
            pieces = _chat(document.row["messages"], tokenizer, data, counts)
        elif "text" in document.row:
            pieces = _windows(next(opening), _eos(tokenizer), data)
        elif "completion" in document.row:
            rest = [*next(completion), _eos(tokenizer)]
            pieces = [(next(opening), rest, [True] * len(rest))]
        else:
            pieces = [(next(opening), [], [])]
        fitted = [_fitted(document, piece, data, counts) for piece in pieces if piece[0]]
        examples.append([example for example in fitted if example is not None])
        counts["documents_dropped"] += not examples[-1]
    return examples


def _fitted(
    document: Document, piece: Piece, data: DataConfig, counts: Counter[str]
) -> Example | None:
    """Cut the prompt on the left, so that a token fits after it, then the rest on the right.

    None for what is too long where `data.overlong` drops it.
    """
    prompt, rest, mask = piece
    if data.overlong == "drop" and len(prompt) + max(1, len(rest)) > data.max_length:
        counts["rows_dropped"] += 1
        return None
    counts["prompts_cut"] += len(prompt) > data.max_length - 1
    prompt = prompt[-(data.max_length - 1) :]
    room = data.max_length - len(prompt)
    counts["completions_cut"] += len(rest) > room
    loss_mask = [False] * len(prompt) + mask[:room]
    return Example(prompt + rest[:room], loss_mask, document.id, document.domain)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool, literal: bool
) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(
        texts,
        add_special_tokens=special,
        split_special_tokens=literal,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # a document may well be longer than the model's context
    )["input_ids"]


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("target.path: its tokenizer has no EOS token, so that no text could end")
    return tokenizer.eos_token_id


def _windows(ids: list[int], eos: int, data: DataConfig) -> list[Piece]:
    """Cut a text's ids into windows without overlap; EOS marks its true end where it fits."""
    length, prompt = data.max_length, data.prompt_tokens
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    if windows and len(windows[-1]) < length and windows[-1][-1] != eos:
        windows[-1] = [*windows[-1], eos]
    if len(windows) > 1 and len(windows[-1]) < min(length, prompt + SHORT_WINDOW):
        windows.pop()
    return [
        (window[:prompt], window[prompt:], [True] * (len(window) - prompt))
        for window in windows
        if len(window) > prompt
    ]


# Chats


def _chat(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    counts: Counter[str],
) -> list[Piece]:
    """The pieces of a chat: all its answers carry loss; one that awaits an answer is a prompt."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{setting(data)} holds `messages`, but the tokenizer of target.path has no chat "
            "template: take an instruct model, or rows of prompt and completion"
        )
    try:
        if messages[-1]["role"] != "assistant":
            return [(_rendered(tokenizer, messages, prompt=True)["input_ids"], [], [])]
        if GENERATION_BLOCK.search(tokenizer.get_chat_template()):
            marked = _rendered(tokenizer, messages, return_assistant_tokens_mask=True)
            ids, mask = marked["input_ids"], [bool(one) for one in marked["assistant_masks"]]
        else:
            ids = _rendered(tokenizer, messages)["input_ids"]
            mask = _answer_mask(ids, messages, tokenizer, counts)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"{setting(data)}: the chat template of target.path refuses the chat that begins "
            f"{str(messages[0].get('content'))[:40]!r} ({str(error).partition(chr(10))[0]})"
        ) from error
    if True not in mask:
        return []
    first, end = mask.index(True), len(mask) - mask[::-1].index(True)
    return [(ids[:first], ids[first:end], mask[first:end])]


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    prompt: bool = False,
    **options: Any,
) -> Any:
    template = tokenizer.get_chat_template()
    return tokenizer.apply_chat_template(
        messages,
        chat_template=DATE_MACRO + template if "strftime_now" in template else template,
        add_generation_prompt=prompt,
        return_dict=True,
        tokenizer_kwargs={"verbose": False},
        **options,
    )


def _answer_mask(
    ids: list[int],
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    counts: Counter[str],
) -> list[bool]:
    """Find each answer between the chat that awaits it and the chat that ends with it.

    Some templates rewrite a turn once it is history (they drop its reasoning): such a turn carries
    no loss and is counted. The last answer must be found: ValueError otherwise.
    """
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        last = index == len(messages) - 1
        before = _rendered(tokenizer, messages[:index], prompt=True)["input_ids"] if index else ids
        upto = ids if last else _rendered(tokenizer, messages[: index + 1])["input_ids"]
        pairs = zip(before, ids, strict=False)
        start = next((at for at, (one, other) in enumerate(pairs) if one != other), len(before))
        # The answer's first characters may merge with the last token before it.
        if index == 0 or start < len(before) - 1 or ids[: len(upto)] != upto:
            if last:
                raise ValueError(
                    "data.path: an answer cannot be found in the text that the chat template of "
                    "target.path makes: give it {% generation %} blocks, or other rows"
                )
            counts["turns_without_loss"] += 1
            continue
        stop = len(upto)
        if tokenizer.eos_token_id in ids[start:stop]:  # what follows it belongs to the next turn
            stop = ids.index(tokenizer.eos_token_id, start) + 1
        mask[start:stop] = [True] * (stop - start)
    return mask
