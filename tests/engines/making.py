"""Small folders of models whose tokenizer has merges, as every loader of transformers reads it."""

from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftkit.config import DraftConfig, TargetConfig
from draftkit.models.loading import save_model
from tests import tiny
from tests.trained import train_byte_bpe

TEXT = ["def add(first, second):\n    return first + second  # 1234 times, isn't it?\n" * 20]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose end of text is the one that every tokenizer of Qwen has."""
    return train_byte_bpe(TEXT, 300)


REAL = len(tokenizer())


def model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model over the tokenizer's ids, or over more rows by `vocab_size`."""
    return tiny.model(architecture, **{"vocab_size": REAL, "eos_token_id": 0} | changes)


def saved(made: PreTrainedModel, folder: Path, **options: Any) -> TargetConfig:
    save_model(made, tokenizer(), folder, **options)
    return TargetConfig(path=str(folder))


def saved_draft(made: PreTrainedModel, folder: Path, **options: Any) -> DraftConfig:
    return DraftConfig(path=saved(made, folder, **options).path)
