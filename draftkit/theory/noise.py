"""Uniform noise as a pure function of its position, and the one place that turns it into tokens.

Every stochastic function of draftkit takes noise as a tensor. It is made here, by hashing a
counter: (seed, row, committed length at the start of the round, offset in the round, purpose).
The same key always gives the same number, whatever else is in the batch, so a row can be decoded
alone, joined to others or replayed. (The same tokens follow in float32: in bfloat16 batches of
other sizes round the probabilities differently, and `sample` is as exact as these.) Keys of two
rounds differ, so that the noise of proposals that were rejected is never met again. (Keyed by
absolute position alone it would be: that leaves the law of plain rejection sampling intact but
biases block verification.)

Each word of the key is mixed by itself, by multiply and xor-shift as in the finalisers of C.
Wellons' hash-prospector; the sums of the mixed words are 64 bits of state in two halves, and the
offset is mixed into one half after the other. All of it is integer arithmetic inside int64 with
32-bit words and multipliers below 2^31, so that no product leaves int64 and every device gives
the same bits. What is computed from indices (`arange`) alone stays inside int32, since compilers
may compute it there, and for CUDA they do.

This module knows nothing of models, rounds or probabilities beyond the weights it samples from.
Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

# Purposes: proposals, acceptance tests, correction or bonus token, dropout.
DRAFT, ACCEPT, NEXT, DROPOUT = 0, 1, 2, 4

_BITS_32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: its multiples spread over 32 bits
_ROUNDS = ((16, 0x7FEB352D), (15, 0x31848BAB))  # (shift, odd multiplier below 2^31)


def _mix(word: Tensor) -> Tensor:
    """A bijection of the 32-bit integers in which each input bit moves every output bit."""
    for shift, multiplier in _ROUNDS:
        word = ((word ^ (word >> shift)) * multiplier) & _BITS_32
    return word ^ (word >> 16)


def uniform(
    *,
    seed: Tensor,
    row: Tensor,
    length: Tensor,
    count: int,
    purpose: int,
    first: int = 0,
) -> Tensor:
    """Independent uniforms in [0, 1) for offsets first, ..., first + count - 1 of one round.

    seed, row, length: [B] int64; all 64 bits of the seed count, 32 of row and length.
    Returns [B, count] float64, multiples of 2^-52: 0 can occur, 1 cannot.
    """
    words = (seed, seed >> 32, row, length) * 2
    # Numbers, not a tensor of indices: a compiler may compute what is made of indices in int32.
    salts = (((word + 8 * purpose) * _GOLDEN) & _BITS_32 for word in range(8))
    salted = torch.stack([word ^ salt for word, salt in zip(words, salts, strict=True)])  # [8, B]
    state = _mix(salted & _BITS_32).unflatten(0, (2, 4)).sum(1) & _BITS_32  # [2, B]
    offset = torch.arange(first, first + count, device=seed.device)
    low = _mix(state[0, :, None] ^ offset)  # [B, count]
    high = _mix((state[1, :, None] + low) & _BITS_32)
    return (((high >> 6) << 26) | (low >> 6)).double() * 2.0**-52


def sample(*, probs: Tensor, uniform: Tensor) -> Tensor:
    """The token whose interval of the cumulative distribution holds `uniform`: inverse CDF.

    probs: [..., V] non-negative weights, of any positive sum; uniform: [...] in [0, 1).
    Returns [...] int64. A token of weight zero is never returned, not even where a parallel
    cumulative sum fails to be monotone: such tokens have no interval to fall into.
    """
    cumulative = probs.double().cumsum(-1)  # [..., V]
    upper = torch.where(probs > 0, cumulative, 0.0)
    threshold = uniform[..., None] * upper.amax(-1, keepdim=True)  # below the maximum: uniform < 1
    return (upper > threshold).to(torch.uint8).argmax(-1)
