"""Text that reaches the caches outside of rounds: prompts, what went by, and encoders' texts.

Shapes: B rows, N fed tokens, E encoder tokens.
"""

from collections.abc import Sequence

import torch

from draftkit.decoding.proposers import Proposer
from draftkit.decoding.round import Bench
from draftkit.decoding.state import Slot, to_device
from draftkit.models.cache import visible_slots

WIDTH_STEPS = {"cuda": 64}  # of passes, by type of device: libraries plan each new width anew


def feed(
    bench: Bench,
    slots: Sequence[int],
    starts: Sequence[int],
    width: int,
    *,
    to_target: bool,
    proposer: Proposer | None,
) -> None:
    """Feed the `width` tokens of each of `slots` from `starts` on to target and proposer.

    A row that is shorter runs on into garbage, which lands in slots that its own tokens overwrite
    before anything sees them.
    """
    device, capacity = bench.target.device, bench.cache.capacity
    rows, first = to_device([slots, starts], device, torch.long)
    visible = visible_slots(min(max(starts) + width, capacity), capacity)
    step = WIDTH_STEPS.get(device.type, 1)
    wide = -(-width // step) * step  # what is fed beyond `width` is garbage, as in shorter rows
    positions = first[:, None] + torch.arange(wide, device=device)  # [B, N]
    positions = positions.clamp(max=capacity - 1)
    tokens = bench.state.tokens[rows].gather(1, positions)
    if to_target:
        cache = bench.cache.select(rows, visible=visible)
        bench.target.prefill(tokens, positions=positions, cache=cache)
    if proposer is not None:
        streams = [bench.cache.streams[layer] for layer in proposer.reads]
        before = (positions - 1).clamp(min=0)
        features = [stream[rows[:, None], before] for stream in streams]
        proposer.prefill(
            tokens,
            positions=positions,
            rows=rows,
            visible=visible,
            features=torch.cat(features, -1) if features else None,
        )


def feed_encoders(bench: Bench, slots: Sequence[Slot], proposer: Proposer | None) -> None:
    """Let the encoders of target and proposer read the texts of `slots`."""
    device = bench.target.device
    texts = [list(slot.encoder_ids) for slot in slots]
    longest = max(map(len, texts))
    padded = [text + [0] * (longest - len(text)) for text in texts]
    tokens = to_device(padded, device, torch.long)
    columns = [[len(text) for text in texts], [slot.number for slot in slots]]
    lengths, rows = to_device(columns, device, torch.long)
    cache = bench.cache.select(rows, visible=bench.cache.capacity)
    bench.target.encode(tokens, lengths=lengths, cache=cache)
    if proposer is not None:
        proposer.encode(tokens, lengths=lengths, rows=rows)
