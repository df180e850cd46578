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
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config import DataConfig
from draftkit.data.bad_rows import BadRow, BadRows, reason_of
from draftkit.data.chats import ChatFormat, TemplateRefusal, chat_format, text_ids
from draftkit.data.corpora import SPLITS, Document, setting, split_documents
from draftkit.data.history import answers, is_weightless
from draftkit.data.lengths import COUNTS, UNCUT, WHOLE, Lengths, Room, lengths_within
from draftkit.data.rows import name_of
from draftkit.data.store import Lazy, hash_order, rank_in_group, read_rows, write_rows

SHORT_WINDOW = 8  # tokens after the prompt below which the rest of a text is not worth a row
TOGETHER = 256  # documents whose texts are tokenised at once
EMPTY = re.compile(r"\s*<([\w:]*think[\w:]*)>\s*</\1>")  # reasoning, in the first ...
EMPTY_TOKENS = 32  # ... tokens of an answer
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
Chat = list[dict[str, Any]]
Piece = tuple[list[int], list[int], bool]  # prompt, answer, whether the prompt lacks turns


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
    left_out: Sequence[str] = ()  # the first bad row of each kind, with its place and reason


def begun(ids: Sequence[int], start: int | None) -> list[int]:
    """The row of a prompt, up to where its answer begins: by `start` under an encoder-decoder."""
    return [*ids] if start is None or start in ids else [*ids, start]


def make_splits(
    documents: Iterable[Document],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    context: int = WHOLE,
    start: int | None = None,
) -> Splits:
    """Split and tokenise `documents`, those of `data`; the examples go to files in `folder`.

    Every example is within the lengths of `data` and fits `context`, the tokens of the longest
    text that the models take; its first token is prompt. Texts with the same prompt are one
    document. Where a prompt is in two splits all the same (that of a later window, or what is left
    of a longer one) it is held out: no training or validation example has a prompt of test.

    start: as for `RowReader`. Documents are read once; of each, and of each example, some hashes
    are in memory. Raises ValueError, one line, for too many rows that cannot be used, and for a
    split without a usable row.
    """
    lengths = lengths_within(context, data)
    reader, unsorted = RowReader(tokenizer, data, lengths, start=start), folder / UNSORTED
    keys, own, sizes = array("Q"), [], []  # of every document
    contents, prompts = array("Q"), array("Q")  # of every example

    def read() -> Iterator[dict[str, Any]]:
        for document, examples in reader.read(documents):
            keys.append(document.key)
            own.append(document.split)
            sizes.append(len(examples))
            for example in examples:
                contents.append(hash_order(f"{example.document} {example.token_ids}"))
                prompts.append(hash_order(str(example.prompt_ids)))
                yield vars(example)

    try:
        write_rows(unsorted, SCHEMA, read())
        of_document, split_of = np.asarray(keys), split_documents(np.asarray(keys), own, data)
        splits, documents_of = np.repeat(split_of, sizes), np.repeat(of_document, sizes)
        chosen = _in_turn(splits, documents_of, np.asarray(contents), np.asarray(prompts))
        if empty := [split for split in SPLITS if not len(chosen[split])]:
            equal = bool((splits == SPLITS.index(empty[0])).any())
            too_long = reader.counts["rows_dropped"] > 0
            raise _unusable(empty[0], data, lengths, equal=equal, too_long=too_long)
        sha256 = _write_splits(read_rows(unsorted, Example), chosen, folder)
    finally:
        remove(unsorted)
    counts = reader.counts | Counter({split: len(rows) for split, rows in chosen.items()})
    counts["prompts_shared"] = len(prompts) - sum(map(len, chosen.values()))
    tested = np.asarray(prompts)[chosen["test"]]
    counts["test_prompts_repeated"] = len(tested) - len(np.unique(tested))
    numbers = {name: counts[name] for name in (*SPLITS, *COUNTS)}
    room = lengths.room(data, texts=counts["windows"] > 0, chats=counts["rows"] > 0)
    about = {"sha256": sha256, "counts": numbers, "room": vars(room), "left_out": reader.bad.lines}
    write_json(folder / ABOUT, about)
    return read_splits(folder)


def read_splits(folder: Path) -> Splits:
    """What `make_splits` left in `folder`, mapped into memory."""
    about: dict[str, Any] = read_json(folder / ABOUT)
    about |= {split: read_rows(folder / f"{split}.arrow", Example) for split in SPLITS}
    about["room"] = Room(**about["room"])
    return Splits(**about)


def _in_turn(
    splits: np.ndarray, documents: np.ndarray, contents: np.ndarray, prompts: np.ndarray
) -> dict[str, np.ndarray]:
    """The numbers of the examples of each split, tests first, in the order that `Splits` has.

    splits, documents, contents, prompts: of every example [N], the last three as hashes. Examples
    with a prompt that an earlier split holds are left out. The others are scattered by what they
    hold: the order of the rows in a file says nothing.
    """
    chosen: dict[str, np.ndarray] = {}
    for split in reversed(SPLITS):
        held_out = np.concatenate([prompts[:0], *(prompts[rows] for rows in chosen.values())])
        rows = np.flatnonzero(splits == SPLITS.index(split))
        rows = rows[~np.isin(prompts[rows], held_out, kind="sort")]  # of hashes, no table
        by_hash = rows[np.argsort(contents[rows], kind="stable")]
        rank = rank_in_group(documents[by_hash])
        chosen[split] = by_hash[np.argsort(rank, kind="stable")]
    return chosen


def _write_splits(examples: Sequence[Example], chosen: dict[str, np.ndarray], folder: Path) -> str:
    """Write the `chosen` examples of each split; the SHA-256 of their ids and masks, in order."""
    digest = hashlib.sha256()

    def row(example: Example) -> dict[str, Any]:
        length = len(example.token_ids)
        digest.update(np.asarray([length, *example.token_ids], "<i8").tobytes())
        digest.update(np.asarray(example.loss_mask, bool).tobytes())
        return vars(example)

    for split, numbers in chosen.items():
        digest.update(split.encode())
        write_rows(folder / f"{split}.arrow", SCHEMA, map(row, Lazy(examples.__getitem__, numbers)))
    return digest.hexdigest()


def _unusable(
    split: str, data: DataConfig, lengths: Lengths, *, equal: bool, too_long: bool
) -> ValueError:
    """The refusal of a split without a usable row."""
    reason = "too short; lower data.prompt_tokens or give more text"
    if equal:
        reason = (
            "equal in their prompts to held-out ones: give other text, or raise "
            "data.max_prompt_tokens or data.prompt_tokens, to which prompts are cut"
        )
    elif too_long:
        reason = (
            f"longer than {lengths.prompt} tokens of prompt: raise data.max_prompt_tokens, use "
            "shorter rows, or models of a longer context"
        )
    return ValueError(f"{setting(data)}: no row of the {split} split is usable, all are {reason}")


class RowReader:
    """Tokenises documents as `data` says, and counts what becomes of them.

    lengths: what rows are cut to. start: of an encoder-decoder target the id that begins a
    decoder's text; it ends every prompt, which the encoder reads. counts: by the names of COUNTS.
    bad: the rows that cannot be used. Raises ValueError for settings that do not fit the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        lengths: Lengths = UNCUT,
        *,
        start: int | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.bad = BadRows(data.max_bad_rows)
        self._tokenizer, self._data, self._lengths = tokenizer, data, lengths
        self._start = start
        # Source code names special tokens; in the package's texts these are words, not control.
        self._literal = data.is_packaged
        self._format: ChatFormat = chat_format(tokenizer, data, fixed_date=True)
        begins = text_ids(tokenizer, ["a"])[0][:1]
        self._begin = begins if begins == [tokenizer.bos_token_id] else []

    def read(self, documents: Iterable[Document]) -> Iterator[tuple[Document, list[Example]]]:
        """Each document that can be used and its examples, none where it is too short.

        A text has the name of its prompt, so that those that begin alike are one document; but for
        texts with a split of their own. Raises ValueError at the end where more rows are bad than
        `data.max_bad_rows` allows, and early where the first TOGETHER all are.
        """
        left = iter(documents)
        while lot := list(islice(left, TOGETHER)):
            texts = [document.row["text"] for document in lot if "text" in document.row]
            ids = iter(text_ids(self._tokenizer, texts, literal=self._literal))
            for document in lot:
                before = self.counts.copy()
                try:
                    read, examples = self._read(document, ids)
                except (BadRow, RecursionError) as error:
                    self.counts = before
                    self.counts["rows_bad"] += 1
                    self.bad.add(document.origin, reason_of(error))
                    continue
                self.counts["documents"] += 1
                self.counts["documents_dropped"] += not examples
                yield read, examples
            if not self.counts["documents"]:
                break
        self.bad.check(self.counts["documents"] + self.counts["rows_bad"])

    def _read(self, document: Document, ids: Iterator[list[int]]) -> tuple[Document, list[Example]]:
        """The examples of a document; `ids` has those of its text. BadRow if it cannot be used."""
        if document.fault:
            raise BadRow(document.fault)
        if self._start is not None and "prompt" not in document.row:
            raise BadRow(
                f"it holds `{next(iter(document.row))}`, and the target is an encoder-decoder: "
                "give rows of `prompt`, which its encoder reads, and `completion`"
            )
        if "text" not in document.row:
            return document, [*self._answers(document)]
        document, examples = self._windows(document, next(ids))
        self.counts["windows"] += len(examples)
        return document, examples

    def _windows(self, document: Document, ids: list[int]) -> tuple[Document, list[Example]]:
        """Cut a text's ids into windows without overlap; EOS marks its true end where it fits."""
        length, prompt = min(self._data.max_length, self._lengths.window), self._data.prompt_tokens
        if document.row["text"] and not document.split:
            text = self._tokenizer.decode(ids[:prompt], clean_up_tokenization_spaces=False)
            document = replace(document, id=name_of(text))
        begin = len(self._begin)
        starts = range(begin, max(len(ids), begin + 1), length - begin)
        windows = [[*self._begin, *ids[start : start + length - begin]] for start in starts]
        if len(windows[-1]) < length:
            windows[-1] = self._ended(windows[-1])
        if len(windows) > 1 and len(windows[-1]) < min(length, prompt + SHORT_WINDOW):
            windows.pop()
        kept = [window for window in windows if len(window) > prompt]
        return document, [_example(document, window[:prompt], window[prompt:]) for window in kept]

    def _answers(self, document: Document) -> Iterator[Example]:
        """The answers of a row that is no plain text, each after its prompt, or a prompt alone.

        The answer is cut on the right, the prompt on the left, or of a chat its oldest turns. A
        chat whose last turn is too long is dropped: a template cut open is no prompt that any
        server sees.
        """
        row, chat, most = document.row, self._chat_of(document.row), self._lengths
        reads = chat is not None or self._start is not None  # no text names what begins an answer
        literal = reads or self._literal or self._data.chat_template != "never"
        texts = [chat or row, row.get("tools")]
        self.counts["rows_naming_special"] += literal and self._format.names_special(texts)
        pieces = self._of_prompt(row, literal) if chat is None else self._of_chat(chat, row)
        for prompt, answer, is_cut in pieces:
            if not prompt:
                continue
            too_long = len(prompt) > most.prompt
            self.counts["rows"] += 1
            self.counts["completions"] += bool(answer)
            if chat is not None and too_long:
                self.counts["rows_dropped"] += 1
                continue
            self.counts["prompts_cut"] += too_long or is_cut
            self.counts["completions_cut"] += len(answer) > most.completion
            if too_long:
                kept = most.prompt - len(self._begin)
                prompt = [*self._begin, *prompt[len(prompt) - kept :]]
            yield _example(document, prompt, answer[: most.completion])

    def _of_prompt(self, row: dict[str, Any], literal: bool) -> Iterator[Piece]:
        """Prompt and completion of a row, tokenised apart."""
        ids = partial(text_ids, self._tokenizer, literal=literal)
        (prompt,) = ids([row["prompt"]])
        prompt = begun(prompt, self._start)
        answers = ids([row["completion"]] if "completion" in row else [], special=False)
        yield prompt, [id for answer in answers for id in self._ended(answer)], False

    def _chat_of(self, row: dict[str, Any]) -> Chat | None:
        """The conversation of a row; None for plain text."""
        if "messages" in row:
            if not self._format.has_template:
                raise BadRow(
                    "it holds `messages`, but the tokenizer of target.path has no chat template: "
                    "take an instruct model, or rows of prompt and completion"
                )
            return row["messages"]
        prompt = row.get("prompt")  # a `text` has none
        plain = self._data.chat_template == "never" or self._start is not None
        if not prompt or plain or not self._format.has_template:
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
            raise BadRow(
                "it holds `tools`, of which the chat template of target.path does not speak: take "
                "a model that calls tools, or rows without them"
            ) from error

    def _of_chat(self, messages: Chat, row: dict[str, Any]) -> Iterator[Piece]:
        """Each answer to a user with what comes before it, and a last turn that awaits one.

        Of an answer that the template does not write there, or whose weight is 0, there is the
        prompt alone. BadRow for a chat that the template refuses.
        """
        template = self._format_of(row)
        self.counts["answers_weightless"] += sum(map(is_weightless, messages))
        try:
            for prompt, answer, is_cut in answers(messages, template, self._lengths.prompt):
                self.counts["answers_unused"] += answer is None
                begins = str(self._tokenizer.decode((answer or [])[:EMPTY_TOKENS]))
                self.counts["answers_empty_reasoning"] += EMPTY.match(begins) is not None
                yield prompt, answer or [], is_cut
        except TemplateRefusal as error:
            raise BadRow(
                f"the chat template of target.path refuses it ({error}): change such rows, or "
                "data.system"
            ) from error

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                "target.path: its tokenizer has no EOS token, so that no text could end"
            )
        return ids if ids[-1:] == [end] else [*ids, end]


def _example(document: Document, prompt: list[int], answer: list[int]) -> Example:
    mask = [False] * len(prompt) + [True] * len(answer)
    return Example(prompt + answer, mask, document.id, document.domain)
