"""What target and draft say at every position of texts: the laws that serve and propose there.

Each is warped by the very function that serves. A draft that reads its own proposals like any text
has one law at a position; of one that proposes chains it depends on the place in a round too.

Shapes: B texts, M generated positions of a text, V vocabulary, T tokens, F features, H hidden.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.models.adapter import Adapter
from draftkit.models.heads import MedusaAdapter
from draftkit.models.parallel import chains, unrolled
from draftkit.theory.warping import SamplingParams, seen_along, seen_tokens, warp

OWN_LAW = SamplingConfig()  # of the target: temperature 1, nothing cut
CHAINS_AT_ONCE = 128  # that begin in a text: masks grow with the square of what is read together


def sampling_of(context: Record) -> SamplingConfig:
    """The sampling that `context` was served with."""
    values: dict[str, Any] = {**context.sampling, "top_k": int(context.sampling["top_k"])}
    return SamplingConfig(**values)


def is_chained(draft: Adapter) -> bool:
    """Whether the law of a proposal depends on its place in a round, beside the text before it."""
    return draft.parallel is not None or bool(draft.reads)


def logits_of(
    model: Adapter, contexts: Sequence[Record], layers: tuple[int, ...] = ()
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """The logits [M, V] of `model` at the outputs of each of `contexts`, and its streams of
    `layers`, each [B, T, H]."""
    prompts, outputs = [c.prompt_ids for c in contexts], [c.output_ids for c in contexts]
    tokens, keep = padded(prompts, outputs, model.device)
    streams: dict[int, Tensor] = {}
    if layers:
        logits, joined = model.read(tokens, keep, layers)
        assert joined is not None
        streams = dict(zip(layers, joined.chunk(len(layers), -1), strict=True))
        logits = logits if model.head is None else model.head(logits)
    else:
        logits = model.score(tokens, keep)
    return list(logits.split([len(one.output_ids) for one in contexts])), streams


def served_laws(
    contexts: Sequence[Record], logits: Sequence[Tensor], *samplings: SamplingConfig | None
) -> Iterator[list[Tensor]]:
    """The probabilities [M, V] of each of `contexts`, by `samplings`, of its `logits` [M, V].

    One text at a time, so that what is made of its logits stays in a processor's cache.
    """
    for context, rows in zip(contexts, logits, strict=True):
        yield [_warped(rows, context, sampling or sampling_of(context)) for sampling in samplings]


def proposed_laws(
    draft: Adapter,
    contexts: Sequence[Record],
    *samplings: SamplingConfig | None,
    blocks: int | None = None,
    features: Tensor | None = None,
) -> Iterator[Iterable[list[Tensor]]]:
    """Of each text the probabilities of proposals, by their position in a round, by `samplings`.

    A draft that reads its own proposals like any text has one position, which stands for all.
    features: of the target on the padded texts [B, T, F], for a head.
    """
    if not is_chained(draft):
        logits, _ = logits_of(draft, contexts)
        yield from ([laws] for laws in served_laws(contexts, logits, *samplings))
        return
    for row, one in enumerate(contexts):
        own = None if features is None else features[row : row + 1]
        yield _chain_laws(draft, one, samplings, blocks, own)


def _chain_laws(
    draft: Adapter,
    context: Record,
    samplings: Sequence[SamplingConfig | None],
    blocks: int | None,
    features: Tensor | None,
) -> Iterator[list[Tensor]]:
    """The probabilities [M - b, V] of each block b of a draft that proposes chains, by `samplings`.

    Row i is what the draft proposes as token i + b of the output, in a round that begins behind i
    tokens of it; zeros where a head has no features, behind a text of one token.
    """
    count, first = len(context.output_ids), len(context.prompt_ids) - 1
    blocks = min(blocks or draft.blocks, count)
    if isinstance(draft, MedusaAdapter):  # which has no more heads than it was trained with
        blocks = min(blocks, draft.blocks)
    tokens, keep = padded([context.prompt_ids], [context.output_ids], draft.device)
    if features is not None:
        features = features[:, : tokens.shape[1]]
    if draft.parallel is None:
        rows = unrolled(tokens, keep, blocks, keep)
        parts = draft(rows, features).split([int(part.sum()) for part in rows.keep])
    else:
        states: list[list[Tensor]] = [[] for _ in range(blocks)]  # of each block [M - b, H]
        for begin in range(first, first + count, CHAINS_AT_ONCE):
            depth, end = torch.zeros_like(tokens), begin + CHAINS_AT_ONCE + blocks
            depth[:, begin : begin + CHAINS_AT_ONCE] = blocks
            if features is not None:
                depth[:, 0] = 0
            depth, kept = (depth * keep)[:, :end], keep[:, :end]
            rows = chains(tokens[:, :end], kept, depth, token=draft.parallel.token)
            if features is None:
                made = draft.states(rows.tokens, rows.keep, rows.packing)
            else:
                made = draft(rows, features[:, :end])
            for block, of in enumerate(states):
                of.append(made[rows.blocks == block])
        parts = [torch.cat(of) for of in states]
    lacking = features is not None and len(context.prompt_ids) < 2
    for made in parts:
        logits = made if draft.head is None else draft.head(made)
        if lacking:
            logits = torch.cat([logits.new_zeros(1, draft.vocab_size), logits])
        laws = [_warped(logits, context, one or sampling_of(context)) for one in samplings]
        for law in laws:
            law[:lacking] = 0
        yield laws


def _warped(logits: Tensor, context: Record, served: SamplingConfig) -> Tensor:
    """The probabilities [m, V] that `served` makes of `logits` [m, V] at the first outputs.

    The text before them is what a repetition penalty looks at.
    """
    seen, device, vocab_size = None, logits.device, logits.shape[-1]
    if served.repetition_penalty != 1:  # the ids before each position [1, M, V]
        prompt, outputs = (
            torch.tensor([ids], device=device) for ids in (context.prompt_ids, context.output_ids)
        )
        length = torch.tensor([prompt.shape[1]], device=device)
        seen = seen_along(seen_tokens(prompt, length, vocab_size), outputs)[:, : len(logits)]
    params = SamplingParams.uniform(1, **vars(served), device=device)
    return warp(logits[None], params, seen)[0]


def padded(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], padded on the right, and the positions [B, T] that predict outputs."""
    rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    keep = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        keep[index, len(prompt) - 1 : len(row) - 1] = True
    return tokens, keep
