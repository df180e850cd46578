"""From logits to the distribution that is served: penalty, temperature, top-k, top-p, softmax.

The one warp of draftkit. Target and draft go through it alike, in training, evaluation and
decoding, because q must be the distribution that the draft token was really sampled from. Order
and semantics are those of the logits processors of Hugging Face transformers: top-k keeps ties at
the k-th logit, top-p keeps the token that crosses the threshold, and here its ties (there the sort
picks among them).

Sampling parameters are tensors, one entry a row, so that one batch serves requests with different
settings without waiting for the host. The `uses_*` flags and `largest_top_k` are what the host
knows: they only spare work that no row needs, never change a result.

This module knows nothing of models or of where the token history comes from.
Shapes: B rows, T positions, K proposed tokens, L stored tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def promote(values: Tensor) -> Tensor:
    """At least float32: half precision is raised, float64 stays float64."""
    return values if values.dtype == torch.float64 else values.float()


@dataclass(frozen=True)
class SamplingParams:
    """The served sampling of each row. Neutral values: 1.0, 0, 1.0, 1.0."""

    temperature: Tensor  # [B] float; 0 is greedy
    top_k: Tensor  # [B] int64; 0 keeps all
    top_p: Tensor  # [B] float in (0, 1]
    repetition_penalty: Tensor  # [B] float, positive
    uses_top_k: bool
    uses_top_p: bool
    uses_penalty: bool
    uses_greedy: bool  # a row has temperature 0
    uses_sampling: bool  # a row has another
    largest_top_k: int | None = None  # no sampled row keeps more; None where one keeps all

    @staticmethod
    def uniform(
        rows: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        device: torch.device | str | None = None,
    ) -> "SamplingParams":
        """The same settings for `rows` rows."""

        def fill(value: float) -> Tensor:
            return torch.full((rows,), value, dtype=torch.float64, device=device)

        return SamplingParams(
            temperature=fill(temperature),
            top_k=torch.full((rows,), top_k, dtype=torch.int64, device=device),
            top_p=fill(top_p),
            repetition_penalty=fill(repetition_penalty),
            uses_top_k=top_k > 0,
            uses_top_p=top_p < 1,
            uses_penalty=repetition_penalty != 1,
            uses_greedy=temperature == 0,
            uses_sampling=temperature != 0,
            largest_top_k=top_k or None,
        )


def _with_history(logits: Tensor, params: SamplingParams, seen: Tensor | None) -> Tensor:
    """Logits in at least float32; those of tokens seen before moved towards less likely.

    The repetition penalty of CTRL (arXiv 1909.05858).
    """
    logits = promote(logits)
    if not params.uses_penalty:
        return logits
    assert seen is not None, "a repetition penalty needs the tokens seen before each position"
    penalty = params.repetition_penalty.to(logits.dtype)[:, None, None]
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, lowered, logits)


def _one_hot(logits: Tensor, *, inside: float, outside: float) -> Tensor:
    """`inside` at the (first) largest logit, `outside` elsewhere."""
    best = logits.argmax(-1, keepdim=True)  # [B, T, 1]
    return torch.full_like(logits, outside).scatter_(-1, best, inside)


DIGIT = 11  # bits
LEAST_UNSORTED = 8192  # ids, below which a sort is as quick as three histograms


def _edge(logits: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """The least of `logits`, or -inf, above which less than `limit` of `weights` lies: [B, T, 1].

    All but `limit` [B or 1, 1, 1] are [B, T, V]. Exact, in as many passes whatever the values: the
    numbers, as the integers that order them, are looked through digit by digit, by the weight of
    all that share one. A sort of a large V takes several times as long.
    """
    logits, weights = logits.detach(), weights.detach()
    integers, bits = (torch.int32, 32) if logits.dtype == torch.float32 else (torch.int64, 64)
    key = logits.view(integers)
    # Negative numbers order backwards.
    key = torch.where(key < 0, key ^ torch.iinfo(integers).max, key)
    shifts = range((bits - 1) // DIGIT * DIGIT, -1, -DIGIT)
    above: Tensor | float = 0.0
    for shift in shifts:
        is_first = shift == shifts[0]
        digit = key >> shift
        digit = digit + (1 << DIGIT - 1) if is_first else digit & ((1 << DIGIT) - 1)
        empty = logits.new_zeros(*logits.shape[:-1], 1 << DIGIT)
        sums = empty.scatter_add(-1, digit.long(), weights)
        larger = F.pad(sums.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1)) + above
        first = (larger >= limit).sum(-1, keepdim=True)  # the least digit with little above it
        above = larger.gather(-1, first)
        is_there = digit == first
        logits, weights = logits.masked_fill(~is_there, torch.inf), weights * is_there
    edge = logits.amin(-1, keepdim=True)
    return edge.masked_fill(edge == torch.inf, -torch.inf)  # all together are less


def _truncated(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits with -inf outside the top k and outside the nucleus of mass top-p.

    Both cut at a value: that of the k-th logit, and that of the last one with less than top-p of
    the mass above it. Where no row keeps more than a few, of a small vocabulary, or on CUDA, which
    sorts quickly, these are sorted.
    """
    vocab_size = logits.shape[-1]
    sorts = params.largest_top_k is not None or logits.is_cuda or vocab_size < LEAST_UNSORTED
    count = min(params.largest_top_k or vocab_size, vocab_size)
    largest = logits.topk(count).values if sorts else logits  # [B, T, count] descending
    if params.uses_top_k:
        kept = torch.where(params.top_k > 0, params.top_k, count).clamp(max=count)[:, None, None]
        if sorts:
            smallest = largest.gather(-1, (kept - 1).expand(*logits.shape[:-1], 1))  # [B, T, 1]
            largest = largest.masked_fill(largest < smallest, -torch.inf)
        else:
            smallest = _edge(logits, torch.ones_like(logits), kept)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if params.uses_top_p:
        top_p = params.top_p.to(logits.dtype)[:, None, None]
        if sorts:
            probs = (largest - logits.logsumexp(-1, keepdim=True)).exp()
            outside = probs.cumsum(-1) - probs >= top_p
            smallest = largest.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
        else:
            smallest = _edge(logits, logits.softmax(-1), top_p)
        # A top-p of 1 keeps all, however the sum rounds.
        logits = logits.masked_fill((logits < smallest) & (top_p < 1), -torch.inf)
    return logits


def warped_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] as served: -inf outside the support, at least float32.

    seen: [B, T, V] bool, the tokens in the history of each position; needed where any row has a
    repetition penalty. Temperature 0 gives 0 at the (first) largest logit and -inf elsewhere.
    """
    logits = _with_history(logits, params, seen)
    one_hot = _one_hot(logits, inside=0.0, outside=-torch.inf) if params.uses_greedy else logits
    if not params.uses_sampling:
        return one_hot
    temperature = params.temperature.to(logits.dtype)[:, None, None]
    is_greedy = temperature == 0
    logits = logits / torch.where(is_greedy, 1.0, temperature)
    if params.uses_top_k or params.uses_top_p:
        logits = _truncated(logits, params)
    return torch.where(is_greedy, one_hot, logits) if params.uses_greedy else logits


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by one positive temperature for all, at least float32: no cut, no penalty."""
    assert temperature > 0, temperature
    logits = promote(logits)
    return logits if temperature == 1 else logits / temperature


def warp(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The served probabilities [B, T, V] of `logits`; arguments as in `warped_logits`."""
    if not params.uses_sampling:
        return _one_hot(_with_history(logits, params, seen), inside=1.0, outside=0.0)
    return warped_logits(logits, params, seen).softmax(-1)


def seen_tokens(tokens: Tensor, length: Tensor, vocab_size: int) -> Tensor:
    """Which ids occur among the first `length` [B] of `tokens` [B, L]; returns [B, V] bool."""
    is_stored = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
    ids = torch.where(is_stored, tokens, vocab_size)  # the rest goes to a column that is cut off
    seen = torch.zeros(len(tokens), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return seen.scatter(-1, ids, True)[:, :vocab_size]


def seen_along(seen: Tensor, draft_tokens: Tensor, is_earlier: Tensor | None = None) -> Tensor:
    """The history before each position of a round: position i has seen the first i proposals.

    seen: [B, V] bool before the round; draft_tokens: [B, K]; is_earlier: [K + 1, K] bool, where a
    position has seen others. Returns [B, K + 1, V] bool.
    """
    rows, gamma = draft_tokens.shape
    vocab_size = seen.shape[-1]
    index = torch.arange(gamma + 1, device=seen.device)
    if is_earlier is None:
        is_earlier = index[:gamma] < index[:, None]  # [K + 1, K]
    ids = torch.where(is_earlier, draft_tokens[:, None], vocab_size)  # [B, K + 1, K]
    along = torch.zeros(rows, gamma + 1, vocab_size + 1, dtype=torch.bool, device=seen.device)
    return along.scatter(-1, ids, True)[..., :vocab_size] | seen[:, None]
