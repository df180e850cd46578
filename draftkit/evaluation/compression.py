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
from draftkit.evaluation.alpha import padded
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
    counts, sizes = defaultdict[str, int](int), defaultdict[str, int](int)
    for first in range(0, len(examples), batch_size):
        chunk = examples[first : first + batch_size]
        after = [example.token_ids[1:] for example in chunk]
        tokens, keep = padded([e.token_ids[:1] for e in chunk], after, model.device)
        logits = model.score(tokens, keep).split([*map(len, after)])
        for example, ids, z in zip(chunk, after, logits, strict=True):
            token_ids = torch.tensor(ids, dtype=torch.long, device=z.device)
            texts = {"target_logits": z, "draft_logits": z, "token_ids": token_ids}
            nats[example.domain] += float(next_token(**texts, settings=settings).sum())
            sure = ce_argmax(**texts, settings=settings).neg().exp()
            certain[example.domain] += float(sure.sum())
            counts[example.domain] += len(ids)
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            sizes[example.domain] += len(text.encode())
    return {
        domain: TextScore(
            bits_per_byte=nats[domain] / math.log(2) / max(1, sizes[domain]),
            argmax_probability=certain[domain] / max(1, count),
            tokens=count,
        )
        for domain, count in sorted(counts.items())
    }
