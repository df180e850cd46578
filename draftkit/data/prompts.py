"""Rows to token ids: where the prompt ends, and what carries loss.

Every answer of a chat is an example of its own, its prompt all that comes before it; so is a
`prompt` with its `completion`, as a chat of one turn where the tokenizer has a chat template
(`chats`), else tokenised apart, the completion ended by EOS. A `text` is plain: it is cut into
windows of `data.max_length` tokens, each with its first `data.prompt_tokens` as the prompt. Where
the tokenizer puts a token before every text, every window and every prompt that is cut begins with
it, as all do that a server reads.

The loss mask is explicit: nothing is inferred later from padding or special ids. This module does
not know models, batches or losses.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftkit.config import DataConfig
from draftkit.data.chats import ChatFormat, TemplateRefusal, answers, chat_format, text_ids
from draftkit.data.corpora import BadRow, BadRows, Document, reason_of
from draftkit.data.lengths import UNCUT, Lengths
from draftkit.data.rows import IDS, name_of

SHORT_WINDOW = 8  # tokens after the prompt below which the rest of a text is not worth a row
TOGETHER = 256  # documents whose texts are tokenised at once
EMPTY_REASONING = re.compile(r"\s*<([\w:]*think[\w:]*)>\s*</\1>")
LOOKED_AT = 32  # tokens of an answer that may begin so
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


def begun(ids: Sequence[int], start: int | None) -> list[int]:
    """The row of a prompt, up to where its answer begins: by `start` under an encoder-decoder."""
    return [*ids] if start is None or start in ids else [*ids, start]


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
                    if document.fault:
                        raise BadRow(document.fault)
                    if self._start is not None and not {"prompt", IDS[0]} & document.row.keys():
                        raise BadRow(
                            f"it holds `{next(iter(document.row))}`, and the target is an "
                            "encoder-decoder: give rows of `prompt`, which its encoder reads, and "
                            "`completion`"
                        )
                    read, examples = (
                        self._windows(document, next(ids))
                        if "text" in document.row
                        else (document, [*self._answers(document)])
                    )
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
        self.counts["windows"] += len(kept)
        return document, [_example(document, window[:prompt], window[prompt:]) for window in kept]

    def _answers(self, document: Document) -> Iterator[Example]:
        """The answers of a row that is no plain text, each after its prompt, or a prompt alone.

        The answer is cut on the right, the prompt on the left, or of a chat its oldest turns. A
        chat whose last turn is too long is dropped, and a record whose prompt is: a template cut
        open is no prompt that any server sees.
        """
        row, most = document.row, self._lengths
        chat = None if IDS[0] in row else self._chat_of(row)
        reads = chat is not None or self._start is not None  # no text names what begins an answer
        literal = reads or self._literal or self._data.chat_template != "never"
        texts = [chat or row, row.get("tools")]
        is_record = IDS[0] in row
        names_special = literal and not is_record and self._format.names_special(texts)
        self.counts["rows_naming_special"] += names_special
        pieces: Iterable[Piece]
        if is_record:
            if max(max(row[name]) for name in IDS) >= len(self._tokenizer):
                raise BadRow("its ids are of another vocabulary than target.path's")
            pieces = [(row[IDS[0]], row[IDS[1]], False)]
        elif chat is not None:
            pieces = self._of_chat(chat, row)
        else:  # prompt and completion are tokenised apart
            (ids,) = text_ids(self._tokenizer, [row["prompt"]], literal=literal)
            replies = [row["completion"]] if "completion" in row else []
            replied = text_ids(self._tokenizer, replies, special=False, literal=literal)
            answer = [id for reply in replied for id in self._ended(reply)]
            pieces = [(begun(ids, self._start), answer, False)]
        for prompt, answer, is_cut in pieces:
            if not prompt:
                continue
            too_long = len(prompt) > most.prompt
            self.counts["rows"] += 1
            self.counts["completions"] += bool(answer)
            if (chat is not None or is_record) and too_long:
                self.counts["rows_dropped"] += 1
                continue
            self.counts["prompts_cut"] += too_long or is_cut
            self.counts["completions_cut"] += len(answer) > most.completion
            if too_long:
                kept = most.prompt - len(self._begin)
                prompt = [*self._begin, *prompt[len(prompt) - kept :]]
            yield _example(document, prompt, answer[: most.completion])

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

    def _of_chat(self, messages: Chat, row: dict[str, Any]) -> Iterator[Piece]:
        """Each answer to a user with what comes before it, and a last turn that awaits one.

        Of an answer that the template does not write there, or whose weight is 0, there is the
        prompt alone. BadRow for a chat that the template refuses.
        """
        template = self._format
        if "tools" in row:
            try:
                template = replace(template, options={**template.options, "tools": row["tools"]})
            except ValueError as error:
                raise BadRow(
                    "it holds `tools`, of which the chat template of target.path does not speak: "
                    "take a model that calls tools, or rows without them"
                ) from error
        # As files of OpenAI for tuning have it: such an answer is not to be learned.
        weights = [turn.get("weight") for turn in messages if turn["role"] == "assistant"]
        self.counts["answers_weightless"] += weights.count(0)
        try:
            for prompt, answer, is_cut in answers(messages, template, self._lengths.prompt):
                self.counts["answers_unused"] += answer is None
                begins = str(self._tokenizer.decode((answer or [])[:LOOKED_AT]))
                self.counts["answers_empty_reasoning"] += EMPTY_REASONING.match(begins) is not None
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
