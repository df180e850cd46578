"""Rows to token ids: where the prompt ends, what carries loss, which split an example is in.

Every answer of a chat is an example of its own, its prompt all that comes before it; so is a
`prompt` with its `completion`, as a chat of one turn where the tokenizer has a chat template
(`chats`), else tokenised apart, the completion ended by EOS. A `text` is plain: it is cut into
windows of `data.max_length` tokens, each with its first `data.prompt_tokens` as the prompt. Where
the tokenizer puts a token before every text, every window and every prompt that is cut begins with
it, as all do that a server reads.

The loss mask is explicit: nothing is inferred later from padding or special ids. This module does
not know models, batches or losses.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config import DataConfig
from draftkit.data.chats import ChatFormat, TemplateRefusal, chat_format, text_ids
from draftkit.data.corpora import SPLITS, Document, name_of, setting, split_documents
from draftkit.data.history import answers
from draftkit.data.lengths import UNCUT, WHOLE, Lengths, Room, lengths_within
from draftkit.data.store import (
    ORDER,
    Mapped,
    Picked,
    Stored,
    hash_order,
    rank_in_group,
    write_rows,
)

SHORT_WINDOW = 8  # tokens after the prompt below which the rest of a text is not worth a row
DOCUMENTS = 256  # tokenised together
HEAD = 16  # characters of a text for each token of its prompt: enough to know the prompt by
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
    "documents_dropped",  # no prompt, nothing after it, or all their rows are dropped
    "windows",  # of plain text
    "rows",  # all others: a prompt, with its answer where it has one
    "rows_dropped",  # of them: chats whose last turn is too long
    "prompts_cut",  # to data.max_prompt_tokens: chats lose their oldest turns, others their left
    "completions",  # rows with an answer
    "completions_cut",  # on the right, to data.max_completion_tokens
    "prompts_templated",  # strings that became a user turn
    "rows_naming_special",  # of chats and prompts: a special token's name, which is text there
    "answers_unused",  # of chats, where the template does not write them after their prompt
    "prompts_shared",  # examples left out, as another split has held out their prompt
    "test_prompts_repeated",  # those that an earlier test example has as well
)

Chat = list[dict[str, Any]]


class Piece(NamedTuple):
    """Ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]
    is_chat: bool = False
    is_cut: bool = False  # turns of the chat are left out of the prompt


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
    """Examples by split, in an order in which any first n are of as many documents as there are.

    Each document gives one example, in hash order, before any gives a second.
    """

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    sha256: str  # of token ids and masks, in order
    counts: dict[str, int]  # examples by split, and COUNTS
    room: Room  # of sampled answers to their prompts


def make_splits(
    documents: Sequence[Document],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    context: int = WHOLE,
) -> Splits:
    """Split and tokenise `documents`, those of `data`; the examples go to files in `folder`.

    Every example is within the lengths of `data` and fits `context`, the tokens of the longest
    text that the models take; its first token is prompt. Texts with the same prompt are one
    document. Where a prompt is in two splits all the same (that of a later window, or what is left
    of a longer one) it is held out: no training or validation example has a prompt of test.

    Raises ValueError, one line, for rows that cannot be used, and for a split without a usable row.
    """
    lengths = lengths_within(context, data)
    reader = RowReader(tokenizer, data, lengths)
    counts, digest = reader.counts, hashlib.sha256()
    held_out: set[bytes] = set()  # hashes of prompts
    members = split_documents(reader.named(documents), data)
    for split in reversed(SPLITS):  # what is for tests first
        path = folder / f"{split}.arrow"
        examples, prompts = _documents_in_turn(members[split], folder / UNSORTED, reader, held_out)
        write_rows(path, SCHEMA, map(vars, examples))
        remove(folder / UNSORTED)
        counts[split] = len(examples)
        digest.update(split.encode())
        for example in Stored(path, Example):
            digest.update(np.asarray([len(example.token_ids), *example.token_ids], "<i8").tobytes())
            digest.update(np.asarray(example.loss_mask, bool).tobytes())
        if split != "train":
            held_out |= (distinct := {key.tobytes() for key in prompts})
            if split == "test":
                counts["test_prompts_repeated"] = len(prompts) - len(distinct)
    if empty := [split for split in SPLITS if not counts[split]]:
        raise _unusable(empty[0], data, lengths, too_long=counts["rows_dropped"] > 0)
    numbers = {name: counts[name] for name in (*SPLITS, *COUNTS)}
    room = lengths.room(data, texts=counts["windows"] > 0, chats=counts["rows"] > 0)
    about = {"sha256": digest.hexdigest(), "counts": numbers, "room": vars(room)}
    write_json(folder / ABOUT, about)
    return read_splits(folder)


def read_splits(folder: Path) -> Splits:
    """What `make_splits` left in `folder`, mapped into memory."""
    parts = {split: Stored(folder / f"{split}.arrow", Example) for split in SPLITS}
    about: dict[str, Any] = read_json(folder / ABOUT)
    room = Room(**about["room"])
    return Splits(**parts, sha256=about["sha256"], counts=about["counts"], room=room)


def _unusable(split: str, data: DataConfig, lengths: Lengths, *, too_long: bool) -> ValueError:
    """The refusal of a split without a usable row."""
    reason = "too short; lower data.prompt_tokens or give more text"
    if too_long:
        reason = (
            f"longer than {lengths.prompt} tokens of prompt: raise data.max_prompt_tokens, use "
            "shorter rows, or models of a longer context"
        )
    return ValueError(f"{setting(data)}: no row of the {split} split is usable, all are {reason}")


def _documents_in_turn(
    documents: Sequence[Document], path: Path, reader: "RowReader", held_out: set[bytes]
) -> tuple[Sequence[Example], np.ndarray]:
    """The examples of `documents`, through the file `path`, and the hashes of their prompts.

    Those with a prompt of `held_out` are left out. Their hashes alone are in memory. They are
    scattered by what they hold: the order of the rows in a file says nothing.
    """
    contents, names, prompts = bytearray(), bytearray(), bytearray()

    def examples() -> Iterator[dict[str, Any]]:
        for start in range(0, len(documents), DOCUMENTS):
            for windows in reader.read(list(documents[start : start + DOCUMENTS])):
                for example in windows:
                    prompt = hash_order(str(example.prompt_ids))
                    if prompt in held_out:
                        reader.counts["prompts_shared"] += 1
                        continue
                    prompts.extend(prompt)
                    contents.extend(hash_order(f"{example.document} {example.token_ids}"))
                    names.extend(hash_order(example.document))
                    yield vars(example)

    write_rows(path, SCHEMA, examples())
    by_hash = np.argsort(np.frombuffer(contents, ORDER), kind="stable")
    rank = rank_in_group(np.frombuffer(names, ORDER)[by_hash])
    order = by_hash[np.argsort(rank, kind="stable")]
    return Picked(Stored(path, Example), order), np.frombuffer(prompts, ORDER)


class RowReader:
    """Tokenises documents as `data` says, and counts what becomes of them.

    lengths: what rows are cut to. counts: by the names of COUNTS. Raises ValueError for settings
    that do not fit the tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, lengths: Lengths = UNCUT
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._tokenizer, self._data, self._lengths = tokenizer, data, lengths
        # Source code names special tokens; in the package's texts these are words, not control.
        self._literal = data.is_packaged
        self._format: ChatFormat = chat_format(tokenizer, data, fixed_date=True)
        if data.chat_template == "always" and not self._format.has_template:
            raise ValueError(
                "data.chat_template=always: the tokenizer of target.path has no chat template: "
                "take an instruct model, or data.chat_template=auto"
            )
        begins = text_ids(tokenizer, ["a"])[0][:1]
        self._begin = begins if begins == [tokenizer.bos_token_id] else []

    def named(self, documents: Sequence[Document]) -> Sequence[Document]:
        """`documents`, those of `text` rows renamed by their prompts: who begins alike is one.

        Those that have a split of their own keep their names.
        """
        names: list[str] = []
        for start in range(0, len(documents), DOCUMENTS):
            lot = list(documents[start : start + DOCUMENTS])
            texts = ["" if one.split else one.row.get("text", "") for one in lot]
            prompts = iter(self._prompts_of([*filter(None, texts)]))
            names += [
                name_of(next(prompts)) if text else one.id
                for one, text in zip(lot, texts, strict=True)
            ]

        def renamed(index: int) -> Document:
            return replace(documents[index], id=names[index])

        return Mapped(renamed, range(len(names)))

    def _prompts_of(self, texts: Sequence[str]) -> Iterator[str]:
        """What `data.prompt_tokens` make of each of `texts`, read no further than that needs."""
        count = self._data.prompt_tokens
        heads = text_ids(
            self._tokenizer, [text[: HEAD * count] for text in texts], literal=self._literal
        )
        for text, head in zip(texts, heads, strict=True):
            if len(head) < 2 * count:
                (head,) = text_ids(self._tokenizer, [text], literal=self._literal)
            prompt = self._tokenizer.decode(head[:count], clean_up_tokenization_spaces=False)
            yield str(prompt)

    def read(self, documents: Sequence[Document]) -> list[list[Example]]:
        """The examples of each document, none where it is too short.

        Texts are tokenised together, which is fast. Raises ValueError for a row that cannot be
        used.
        """
        chats = [self._chat_of(document.row) for document in documents]
        rows = [row.row for row, chat in zip(documents, chats, strict=True) if chat is None]
        literal = self._literal or self._data.chat_template != "never"
        ids = partial(text_ids, self._tokenizer)
        text = iter(ids([row["text"] for row in rows if "text" in row], literal=self._literal))
        prompt = iter(ids([row["prompt"] for row in rows if "text" not in row], literal=literal))
        completions = [row["completion"] for row in rows if "completion" in row]
        answer = iter(ids(completions, special=False, literal=literal))
        examples: list[list[Example]] = []
        for document, chat in zip(documents, chats, strict=True):
            row = document.row
            if "text" in row:
                examples.append(self._windows(document, next(text)))
                self.counts["windows"] += len(examples[-1])
            else:
                named = (literal or chat is not None) and self._format.names_special(row)
                self.counts["rows_naming_special"] += named
                if chat is not None:
                    pieces = [*self._answers(chat, self._format_of(row))]
                else:
                    ended = self._ended([*next(answer)]) if "completion" in row else []
                    pieces = [Piece(next(prompt), ended)]
                fitted = [self._fitted(document, piece) for piece in pieces if piece.prompt]
                examples.append([example for example in fitted if example is not None])
            self.counts["documents_dropped"] += not examples[-1]
        self.counts["documents"] += len(documents)
        return examples

    def _chat_of(self, row: dict[str, Any]) -> Chat | None:
        """The conversation of a row; None for plain text."""
        if "messages" in row:
            if not self._format.has_template:
                raise ValueError(
                    f"{setting(self._data)} holds `messages`, but the tokenizer of target.path has "
                    "no chat template: take an instruct model, or rows of prompt and completion"
                )
            return row["messages"]
        prompt = row.get("prompt")  # a `text` has none
        if not prompt or self._data.chat_template == "never" or not self._format.has_template:
            return None
        self.counts["prompts_templated"] += 1
        turns = {"user": "prompt", "assistant": "completion"}
        return [{"role": r, "content": row[name]} for r, name in turns.items() if name in row]

    def _format_of(self, row: dict[str, Any]) -> ChatFormat:
        """The chat template, with the tools of `row` where it has some."""
        if "tools" not in row:
            return self._format
        try:
            options = {**self._format.options, "tools": row["tools"]}
            return replace(self._format, options=options)
        except ValueError as error:
            raise ValueError(
                f"{setting(self._data)} holds `tools`, of which the chat template of target.path "
                "does not speak: take a model that calls tools, or rows without them"
            ) from error

    def _answers(self, messages: Chat, template: ChatFormat) -> Iterator[Piece]:
        """Each answer to a user with what comes before it, and a last turn that awaits one.

        A template may write a turn otherwise than after its own generation prompt: then there is
        the prompt alone. Raises ValueError for a chat that the template refuses.
        """
        try:
            for prompt, answer, is_cut in answers(messages, template, self._lengths.prompt):
                self.counts["answers_unused"] += answer is None
                yield Piece(prompt, answer or [], is_chat=True, is_cut=is_cut)
        except TemplateRefusal as error:
            begins = str(messages[0].get("content"))
            raise ValueError(
                f"{setting(self._data)}: the chat template of target.path refuses the chat that "
                f"begins {begins[:40]!r} ({error}): change such rows, or data.system"
            ) from error

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self._eos else [*ids, self._eos]

    @property
    def _eos(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                "target.path: its tokenizer has no EOS token, so that no text could end"
            )
        return self._tokenizer.eos_token_id

    def _fitted(self, document: Document, piece: Piece) -> Example | None:
        """Cut the answer on the right, the prompt on the left, or of a chat its oldest turns.

        None for a chat whose last turn is too long: a template cut open is no prompt that any
        server sees.
        """
        too_long = len(piece.prompt) > self._lengths.prompt
        self.counts["rows"] += 1
        self.counts["completions"] += bool(piece.answer)
        if piece.is_chat and too_long:
            self.counts["rows_dropped"] += 1
            return None
        self.counts["prompts_cut"] += too_long or piece.is_cut
        self.counts["completions_cut"] += len(piece.answer) > self._lengths.completion
        prompt = piece.prompt
        if too_long:
            kept = self._lengths.prompt - len(self._begin)
            prompt = [*self._begin, *prompt[len(prompt) - kept :]]
        return _example(document, prompt, piece.answer[: self._lengths.completion])

    def _windows(self, document: Document, ids: list[int]) -> list[Example]:
        """Cut a text's ids into windows without overlap; EOS marks its true end where it fits."""
        length, prompt = min(self._data.max_length, self._lengths.window), self._data.prompt_tokens
        begin = len(self._begin)
        starts = range(begin, max(len(ids), begin + 1), length - begin)
        windows = [[*self._begin, *ids[start : start + length - begin]] for start in starts]
        if len(windows[-1]) < length:
            windows[-1] = self._ended(windows[-1])
        if len(windows) > 1 and len(windows[-1]) < min(length, prompt + SHORT_WINDOW):
            windows.pop()
        kept = [window for window in windows if len(window) > prompt]
        return [_example(document, window[:prompt], window[prompt:]) for window in kept]


def _example(document: Document, prompt: list[int], answer: list[int]) -> Example:
    mask = [False] * len(prompt) + [True] * len(answer)
    return Example(prompt + answer, mask, document.id, document.domain)
