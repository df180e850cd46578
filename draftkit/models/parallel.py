"""Parallel drafters (PARD, arXiv 2504.18583): K proposals in one pass over mask tokens.

A parallel drafter is a plain language model. After a text it is fed K - 1 masks, tokens of an id
that no text uses, at the next positions: the logits at the last token of the text are those of the
first proposal, and those at mask b of proposal b, which so depends on the text alone. `pard_token`
and `pard_k` in config.json name the id, and how many proposals it was trained for.

Training makes all these chains of a text in one row. Entry (b, t) stands at position t, predicts
token t + 1, and is entry b of the chain that begins behind token t - b: the token itself (b = 0)
or a mask. It sees the tokens 0..t - b and the masks of its own chain up to itself, as in decoding.

Shapes: B rows, T tokens, L tokens and masks, M generated tokens, N entries, K blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ENCODER_DECODER = "encoder-decoder"  # what a summary calls a drafter of that kind
LEAST_KEPT = 0.2  # of the chains, at every depth


class Parallel(NamedTuple):
    """The id of the masks, and the proposals that a pass was trained for."""

    token: int
    blocks: int


@dataclass(frozen=True)
class Packing:
    """Several texts in a row, which do not see each other, and the masks of their chains."""

    positions: Tensor  # [B, L], from 0 in each text
    segments: Tensor  # [B, L], another number for each text of a row
    blocks: Tensor | None = None  # [B, L], 0 for tokens, else the place of a mask in its chain

    def seen(self) -> tuple[Tensor, Tensor]:
        """[B, 1, L, L]: how far back each entry lies of each, and whether it may be seen at all."""
        behind = self.positions[:, None, :, None] - self.positions[:, None, None, :]
        own = self.segments[:, None, :, None] == self.segments[:, None, None, :]
        if self.blocks is None:
            return behind, own & (behind >= 0)
        begins = self.positions - self.blocks  # where the chain of an entry begins
        query, key = begins[:, None, :, None], begins[:, None, None, :]
        is_token = self.blocks[:, None, None, :] == 0
        return behind, own & (behind >= 0) & torch.where(is_token, key <= query, key == query)


class Chains(NamedTuple):
    """Rows with the masks of their chains, and what each predicting entry is, row by row.

    Of a head that is unrolled (`heads`) entries are the texts' tokens, step by step.
    """

    tokens: Tensor  # [B, L]
    keep: Tensor  # [B, L] bool, unrolled [S, B, T]: the N entries
    packing: Packing | None
    predicted: Tensor  # [N] which of the M generated tokens it predicts
    blocks: Tensor  # [N]


def parallel_of(config: PreTrainedConfig) -> Parallel | None:
    """What the configuration of a model says, None for a plain drafter."""
    token = getattr(config, "pard_token", None)
    return None if token is None else Parallel(int(token), int(getattr(config, "pard_k", 1)))


def declare(config: PreTrainedConfig, parallel: Parallel) -> None:
    """Write into `config` that its model is a parallel drafter."""
    marked: Any = config
    marked.pard_token, marked.pard_k = parallel


def kept_share(block: int, decay: float) -> float:
    """The share of the chains that reach `block` in training: conditional drop (PARD, 3.2)."""
    return max(decay**block, LEAST_KEPT)


def depths(predicting: Tensor, blocks: int, decay: float, generator: torch.Generator) -> Tensor:
    """Entries [B, T] of the chain that begins at each token, at least 1 where it predicts.

    Of all chains a share `kept_share(b, decay)` reaches block b, drawn by `generator`: those that
    reach it are among those that reach the block before, so that every chain is whole.
    """
    count = int(predicting.sum())
    rank = torch.randperm(count, generator=generator).to(predicting.device)
    kept = [round(kept_share(block, decay) * count) for block in range(1, blocks)]
    reached = torch.ones_like(rank)
    for most in kept:
        reached += rank < most
    return torch.zeros_like(predicting, dtype=torch.long).masked_scatter(predicting, reached)


def chains(tokens: Tensor, predicting: Tensor, depth: Tensor, *, token: int) -> Chains:
    """The rows `tokens` [B, T] with the masks, of id `token`, of the chains that begin in them.

    predicting: [B, T] bool, where logits predict a generated token. depth: [B, T] entries of the
    chain that begins there, 0 for none; it ends early where nothing generated is left to predict.
    """
    width, steps = tokens.shape[1], int(depth.max())
    begin = torch.arange(width, device=tokens.device)
    # Entry `block` of the chain that `begins` at a token stands `at` another one: [C], C = (K-1) T.
    block = torch.arange(1, max(steps, 1), device=tokens.device).repeat_interleave(width)
    begins = begin.repeat(max(steps, 1) - 1)
    at = (begins + block).clamp(max=width - 1)
    inside = (begins + block < width) & (block < depth[:, begins])  # [B, C]
    inside &= predicting[:, at]
    most = int(inside.sum(1).max()) if inside.numel() else 0
    first = (~inside).byte().argsort(dim=1, stable=True)[:, :most]  # [B, P] of C
    is_mask = inside.gather(1, first)
    at, block = at[first], block[first]
    number = predicting.flatten().cumsum(0).view_as(tokens) - 1  # of the M
    keep_tokens = predicting & (depth > 0)

    def joined(own: Tensor, of_masks: Tensor) -> Tensor:
        return torch.cat([own, torch.where(is_mask, of_masks, 0)], dim=1)

    blocks = joined(torch.zeros_like(tokens), block)
    keep = torch.cat([keep_tokens, is_mask], dim=1)
    predicted = torch.cat([number, number.gather(1, at)], dim=1)
    return Chains(
        joined(tokens, torch.full_like(at, token)),
        keep,
        Packing(
            joined(begin.expand_as(tokens), at),
            joined(torch.ones_like(tokens), torch.ones_like(at)),
            blocks,
        ),
        predicted[keep],
        blocks[keep],
    )


def unrolled(tokens: Tensor, predicting: Tensor, steps: int, begins: Tensor) -> Chains:
    """The rows `tokens` [B, T] with the entries of a head's chains of `steps` (`models.heads`).

    predicting, begins: [B, T] bool, where logits predict a generated token, and where a chain of
    them begins; never at the first token of a text, which has no features before it.
    """
    begins = begins.clone()
    begins[:, 0] = False
    number = predicting.flatten().cumsum(0).view_as(tokens) - 1
    keep, predicted = [], []
    for step in range(steps):
        inside = functional.pad(predicting[:, step:], (0, step)) & begins
        keep.append(inside)
        predicted.append(functional.pad(number[:, step:], (0, step))[inside])
    blocks = [torch.full_like(part, step) for step, part in enumerate(predicted)]
    return Chains(tokens, torch.stack(keep), None, torch.cat(predicted), torch.cat(blocks))


def free_id(
    tokenizer: PreTrainedTokenizerBase, embeddings: int, texts: Iterable[Sequence[int]]
) -> int:
    """An id of `embeddings` rows that no text uses, for the masks.

    The best is one that the tokenizer does not know (padding of the vocabulary), then a special
    token that neither ends texts nor stands in the chat template, then the id of a byte, or a part
    of a letter, that `texts` do not hold. Raises ValueError where there is none.
    """
    used = {token for text in texts for token in text}
    if embeddings > len(tokenizer) and (free := {*range(len(tokenizer), embeddings)} - used):
        return min(free)
    ends = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    template = str(tokenizer.chat_template or "")
    special = {
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and added.content not in template
    }
    pieces = (token for token in range(len(tokenizer)) if tokenizer.decode([token]) == "\ufffd")
    for candidates in (special, set(pieces)):
        if free := candidates - ends - used:
            return max(free)
    raise ValueError(
        "draft.kind: every id of the vocabulary stands for something, and the masks of a drafter "
        "that proposes in one pass need one that no text uses: use draft.kind=plain, or eagle3 "
        "without draft.head.parallel"
    )


def check_unused(parallel: Parallel, texts: Iterable[Sequence[int]]) -> None:
    """Raise ValueError for the first of `texts` that uses the id of the masks."""
    for row, text in enumerate(texts):
        if parallel.token in text:
            raise ValueError(
                f"draft.path: id {parallel.token} stands for the masks (pard_token), and text "
                f"{row} of the training data uses it: take it out of the text, or begin with a "
                "plain drafter"
            )
