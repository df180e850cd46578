"""The tokenizer as the server needs it: prompts to ids, single tokens to text and bytes.

Encoding runs on a copy of the tokenizer and one call at a time: the engine's thread decodes with
the original meanwhile, and a fast tokenizer that is changed while it is read raises. Knows no
requests and no models.
"""

import copy
import functools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftkit.config import DataConfig
from draftkit.data.chats import TemplateRefusal, chat_format, text_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece tokens
_SHOWN_TOKENS = 1 << 16  # whose bytes are remembered


class Texts:
    """A tokenizer for many callers; ids are below `vocab_size`.

    Chats become what the same chats are in training, as `data` says; the date is today's. What a
    turn says is text: no name of a special token in it is that token. start: of an encoder-decoder
    model the id that begins an answer, and ends what its encoder reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        data: DataConfig | None = None,
        *,
        start: int | None = None,
    ) -> None:
        self.vocab_size, self.start = vocab_size, start
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        data = data or DataConfig()
        self._format = chat_format(self._tokenizer, data, fixed_date=False)
        self._lock = threading.Lock()
        self.token_bytes = functools.lru_cache(_SHOWN_TOKENS)(self._token_bytes)
        self.special_ids = set(tokenizer.all_special_ids)  # that a text does not show
        self._byte_of = {c: b for b, c in bytes_to_unicode().items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        serialised = {} if backend is None else json.loads(backend.to_str())
        self._is_byte_level = '"ByteLevel"' in json.dumps(serialised.get("decoder"))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the tokenizer puts before a text. Slow for long texts."""
        with self._lock:
            return text_ids(self._tokenizer, [text], literal=self.start is not None)[0]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a chat that awaits its answer.

        Raises ValueError where the tokenizer has no chat template, or its template refuses.
        """
        if not self._format.has_template or self.start is not None:
            raise ValueError(
                "the tokenizer of this model has no chat template: use /v1/completions"
            )
        with self._lock:
            try:
                return self._format.context(messages)
            except TemplateRefusal as error:
                raise ValueError(
                    f"the chat template of this model refuses the messages ({error})"
                ) from error

    def _token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text; a special token's name, for a text does not show it."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self.special_ids:
            return piece.encode()
        if self._is_byte_level and all(c in self._byte_of for c in piece):
            return bytes(self._byte_of[c] for c in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte.group(1))
        return piece.replace(_SPACE, " ").encode("utf-8", "replace")
