"""Tries, when a model is loaded, what decoding and scoring rely on.

A text must have the same logits alone, beside others in its batch, in pieces over the cache, and
whatever positions share the pass. The families that break this have no mark in common: rope that
follows the longest position, biases by the length of the cache, no cache at all. So the model
itself is asked, in six passes over a few tokens, some of them at large positions.

Shapes: N tokens of the short text or of its end, V real vocabulary.
"""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from draftkit.artifacts import first_line
from draftkit.models.adapter import Adapter
from draftkit.models.cache import SlotCache
from draftkit.models.parallel import Packing
from draftkit.models.shapes import rope_types

SHORT, LONG = [5, 12, 19, 26], [9, 6, 27, 20, 13, 25, 18, 11]  # ids
APART = 64  # positions between tokens, at most: over distances frequencies of rope differ most
FARTHEST = 1 << 17  # no position is larger: some models make a table up to it
# How far logits may lie apart, relative to their spread over the vocabulary. Rounding alone gives
# 1e-5 at most, in bfloat16 0.05 (30 layers); what other positions change gives 0.05 and more.
TOLERANCE, TOLERANCES = 2e-3, {torch.bfloat16: 0.2, torch.float16: 0.05}
SAME_SHAPES = 0.15  # of that, between passes that differ in positions alone


@torch.no_grad()
def check_passes(adapter: Adapter, name: str) -> None:
    """Raise ValueError, a line that begins with `name`, for a model whose logits are not finite, or
    depend on what else is in the pass.
    """
    kind = _kind(adapter)
    trials: dict[str, Callable[[], Tensor]] = {
        "alone": lambda: _scored(adapter, SHORT),
        "beside a longer one": lambda: _scored(adapter, SHORT, LONG),
        "in pieces over a cache": lambda: _stepped(adapter),
    }
    logits_of = {}
    for how, trial in trials.items():
        try:
            logits_of[how] = trial()
        except Exception as error:  # whatever its code makes of arguments that it does not take
            raise ValueError(
                f"{name}: {kind} cannot compute a short text {how} ({first_line(error)}): give a "
                "model that takes positions, masks and a cache"
            ) from error
    alone = logits_of["alone"]
    if bad := int((~alone.isfinite()).sum()):
        raise ValueError(
            f"{name}: {bad:,} of {alone.numel():,} logits of a short text are no finite numbers: "
            "its weights are damaged, or too large for their precision"
        )
    others = [how for how, logits in logits_of.items() if _differ(logits, alone)]
    last = min(adapter.max_positions, FARTHEST) - 1
    apart = max(1, min(APART, adapter.max_positions // 32))
    with suppress(Exception):  # one that takes no positions does not follow them
        near, far = (_packed(adapter, end, apart) for end in (len(LONG) - 1, last))
        if _differ(far, near, SAME_SHAPES):
            others.append(f"beside one at position {last:,}")
    if others:
        raise ValueError(
            f"{name}: {kind} gives a text other logits {others[0]} than alone, so that its answer "
            "would depend on what shares its pass: give a model of another kind"
        )


@torch.no_grad()
def check_packing(adapter: Adapter, name: str) -> None:
    """Raise ValueError, a line that begins with `name`, for a model that counts positions in the
    row where texts share one.
    """
    with suppress(Exception):  # whatever its code makes of a mask or of positions
        if not _differ(_packed(adapter, len(LONG) - 1, 1), _scored(adapter, SHORT)):
            return
    raise ValueError(
        f"{name}: {_kind(adapter)} counts positions in the row, and drafters that propose "
        "in one pass are trained on rows of many texts: use draft.kind=plain"
    )


def _kind(adapter: Adapter) -> str:
    scaled = [one for one in rope_types(adapter.model.config) if one != "default"]
    return " ".join([adapter.model.config.model_type, *(f"(rope_type {one})" for one in scaled)])


def _batch(adapter: Adapter, *texts: list[int]) -> Tensor:
    """`texts`, however small the vocabulary is, padded on the right."""
    width = max(map(len, texts))
    rows = [[*text, *text[-1:] * (width - len(text))] for text in texts]
    return torch.tensor(rows, device=adapter.device) % adapter.vocab_size


def _given(adapter: Adapter, logits: Tensor) -> Tensor:
    """Of `logits` [N, V] those of ids that it can give."""
    return logits if adapter.kept_ids is None else logits[:, adapter.kept_ids]


def _scored(adapter: Adapter, *texts: list[int]) -> Tensor:
    """The logits [N, V] of the first of `texts`, which share a batch."""
    start = adapter.start_id
    rows = [text if start is None else [*text, start, *text] for text in texts]
    tokens = _batch(adapter, *rows)
    keep = torch.zeros_like(tokens, dtype=torch.bool)
    keep[0, len(rows[0]) - len(texts[0]) : len(rows[0])] = True
    return _given(adapter, adapter.score(tokens, keep))


def _stepped(adapter: Adapter) -> Tensor:
    """The logits [N, V] of the end of the short text, which follows its beginning.

    Rows stand at positions of their own, and what lies behind them in the cache is garbage.
    """
    start = [] if adapter.start_id is None else [adapter.start_id]
    tokens, read = _batch(adapter, [*start, *SHORT], [*start, *LONG]), _batch(adapter, SHORT, LONG)
    lengths = torch.tensor([len(SHORT), len(LONG)], device=adapter.device)
    end = len(SHORT) // 2
    cache = SlotCache(2, tokens.shape[1] + 2, read.shape[1])
    if adapter.has_encoder:
        adapter.encode(read, lengths=lengths, cache=cache)
    positions = torch.arange(tokens.shape[1], device=adapter.device).expand(2, -1)
    adapter.prefill(tokens[:, :-end], positions=positions[:, :-end], cache=cache)
    positions = positions[:, :end] + lengths[:, None] + len(start) - end
    return _given(
        adapter, adapter.step(tokens.gather(1, positions), positions=positions, cache=cache)[0]
    )


def _packed(adapter: Adapter, last: int, apart: int) -> Tensor:
    """The logits [N, V] of the short text, whose tokens lie `apart`, in a row that holds the long
    one too, which ends at position `last`. The row is in reverse, since positions alone may count.
    """
    positions = [*range(0, apart * len(SHORT), apart), *range(last + 1 - len(LONG), last + 1)]
    texts = [1] * len(SHORT) + [2] * len(LONG)
    positions, segments = torch.tensor([[positions], [texts]], device=adapter.device).flip(2)
    row = _batch(adapter, [*SHORT, *LONG]).flip(1)
    states = adapter.states(row, segments == 1, Packing(positions, segments))
    logits = states if adapter.head is None else adapter.head(states)
    return _given(adapter, logits).flip(0)


def _differ(logits: Tensor, alone: Tensor, share: float = 1.0) -> bool:
    """Whether most logits [N, V] lie farther than `share` of the tolerance from the last N `alone`.

    Most, as by rounding alone a mixture may choose another expert at single tokens.
    """
    expected = alone[-len(logits) :].float()
    apart = (logits.float() - expected).norm(dim=-1)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    tolerance = share * TOLERANCES.get(logits.dtype, TOLERANCE)
    return bool((apart <= tolerance * spread).float().mean() < 0.5)
