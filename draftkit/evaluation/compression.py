"""How well a model knows a text: bits that it needs for a byte, and how sure it is.

Unlike a loss in nats a token, bits a byte compare models with different tokenizers.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from draftkit.config import DivergenceConfig
from draftkit.data.prompts import Example
from draftkit.models.adapter import Adapter
from draftkit.theory.divergences import ce_argmax, next_token


@dataclass(frozen=True)
class TextScore:
    """Of all tokens but the first of each window: bits a byte, and the mean of max p."""

    bits_per_byte: float
    argmax_probability: float
    tokens: int


@torch.inference_mode()
def score_texts(
    model: Adapter,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int,
) -> dict[str, TextScore]:
    """The score of `model` on windows of text, by their domain, at temperature 1.

    A window is read alone, so its first tokens cost more than they would in the whole text.
    """
    settings = DivergenceConfig()
    nats, certain = defaultdict[str, float](float), defaultdict[str, float](float)
    tokens, sizes = defaultdict[str, int](int), defaultdict[str, int](int)
    for first in range(0, len(examples), batch_size):
        chunk = examples[first : first + batch_size]
        lengths = [len(example.token_ids) for example in chunk]
        ids = torch.zeros(len(chunk), max(lengths), dtype=torch.long, device=model.device)
        for row, example in zip(ids, chunk, strict=True):
            row[: len(example.token_ids)] = torch.tensor(example.token_ids)
        column = torch.arange(ids.shape[1], device=model.device)
        length = torch.tensor(lengths, device=model.device)[:, None]
        logits = model.score(ids, column < length - 1).split([count - 1 for count in lengths])
        for example, row, z in zip(chunk, ids, logits, strict=True):
            after = row[1 : len(example.token_ids)]
            texts = {"target_logits": z, "draft_logits": z, "token_ids": after}
            nats[example.domain] += float(next_token(**texts, settings=settings).sum())
            sure = ce_argmax(**texts, settings=settings).neg().exp()
            certain[example.domain] += float(sure.sum())
            tokens[example.domain] += len(after)
            text = str(tokenizer.decode(after.tolist(), skip_special_tokens=True))
            sizes[example.domain] += len(text.encode())
    return {
        domain: TextScore(
            bits_per_byte=nats[domain] / math.log(2) / max(1, sizes[domain]),
            argmax_probability=certain[domain] / max(1, count),
            tokens=count,
        )
        for domain, count in sorted(tokens.items())
    }
