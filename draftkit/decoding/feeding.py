"""Text that reaches the caches outside of rounds: prompts, what went by, and encoders' texts.

Rows of different lengths are fed together. A shorter row runs on into garbage, which lands in
slots that its own tokens overwrite before anything sees them. Knows no rounds and no noise.

Shapes: B rows, N tokens, E encoder tokens.
"""

from collections.abc import Sequence

import torch

from draftkit.decoding.cache import visible_slots
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.round import Bench
from draftkit.models.seq2seq import EncodingAdapter


def feed(
    bench: Bench,
    slots: Sequence[int],
    starts: Sequence[int],
    width: int,
    *,
    to_target: bool,
    proposer: Proposer | None,
) -> None:
    """Feed the `width` tokens of each of `slots` from `starts` on to target and proposer."""
    device, capacity = bench.target.device, bench.cache.capacity
    rows = torch.tensor(list(slots), device=device)
    first = torch.tensor(list(starts), device=device)
    positions = first[:, None] + torch.arange(width, device=device)  # [B, N]
    positions = positions.clamp(max=capacity - 1)
    tokens = bench.state.tokens[rows].gather(1, positions)
    visible = visible_slots(min(max(starts) + width, capacity), capacity)
    if to_target:
        cache = bench.cache.select(rows, visible=visible)
        bench.target.prefill(tokens, positions=positions, cache=cache)
    if proposer is not None:
        proposer.prefill(tokens, positions=positions, rows=rows, visible=visible)


def feed_encoders(bench: Bench, slots: Sequence[int], proposer: Proposer | None) -> None:
    """Let the encoders of target and proposer read the texts of `slots`."""
    assert isinstance(bench.target, EncodingAdapter)
    device = bench.target.device
    texts = [list(bench.state.requests[slot].encoder_ids) for slot in slots]
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    rows = torch.tensor(list(slots), device=device)
    cache = bench.cache.select(rows, visible=bench.cache.capacity)
    bench.target.encode(tokens, lengths=lengths, cache=cache)
    if proposer is not None:
        proposer.encode(tokens, lengths=lengths, rows=rows)
