"""A sum over tokens, a few tokens at a time: no [tokens, vocabulary] tensor exists in full.

Losses need logits of both models, and at a vocabulary of 152k the logits of 2,048 tokens are 1.2
GB for each model and each tensor that a divergence makes of them. So logits are made of the states
of some tokens, used, differentiated and forgotten before those of the next are made. The gradient
is found on the way forward, since what it needs is at hand only then; going backward scales it.

This module knows no divergences. Shapes: M tokens, m of them at a time, H states, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from draftkit.models.adapter import Head

CHUNK_BYTES = 64 << 20  # of float32 logits of one model
# More at a time gain nothing on a CPU. Of a small vocabulary so many stay in its cache: a step of
# the embedded drafter on 880 tokens takes 1.25 times as long in one piece (loss not compiled).
CHUNK_TOKENS = 512
# No cache holds them there, and each chunk reads the head, and reads and writes its gradient: few
# chunks, but so many that 2,048 tokens of 152,064 ids need under a quarter of what they need whole.
CUDA_CHUNK_BYTES = 192 << 20

LossOf = Callable[[Tensor, slice], Tensor]  # logits [m, V] of the tokens in a slice: their sum


def chunks(count: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Slices of `count` tokens, of at least one and as many as are best on `device`.

    On CUDA `CUDA_CHUNK_BYTES` of logits, else at most `CHUNK_TOKENS` and `CHUNK_BYTES`.
    """
    most, limit = CHUNK_BYTES, CHUNK_TOKENS
    if device.type == "cuda":
        most, limit = CUDA_CHUNK_BYTES, count
    size = max(1, min(limit, most // (4 * vocab_size)))
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def chunked_sum(
    loss_of: LossOf, *, states: Tensor, head: Head | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of `loss_of(logits, rows)` over chunks, differentiable in `states` [M, H] and head.

    Without a head the states are the logits [M, V]; a head of some ids makes logits of these alone.
    dtype: of the head's products, as autocast would have them; default: that of the states.
    """
    if head is None:
        return _ChunkedSum.apply(loss_of, dtype or states.dtype, states, None, None)
    return _ChunkedSum.apply(loss_of, dtype or states.dtype, states, head.weight, head.bias)


class _ChunkedSum(torch.autograd.Function):
    """Finds the gradient in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: LossOf,
        dtype: torch.dtype,
        states: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        _, _, *needs = ctx.needs_input_grad
        grads = [
            torch.zeros_like(tensor) if tensor is not None and needed else None
            for tensor, needed in zip((states, weight, bias), needs, strict=True)
        ]
        grad_states, grad_weight, grad_bias = grads
        cast = None if weight is None else weight.to(dtype)
        cast_bias = None if bias is None else bias.to(dtype)
        total = states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))
        width = states.shape[-1] if weight is None else len(weight)
        for rows in chunks(len(states), width, states.device):
            some = states[rows].to(dtype)
            logits = some if cast is None else functional.linear(some, cast, cast_bias)
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                value = loss_of(leaf, rows)
                (grad,) = torch.autograd.grad(value, leaf)
            total += value.detach()
            if grad_states is not None:
                grad_states[rows] = grad if cast is None else grad @ cast
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, some)
                else:  # kept in a precision of its own
                    grad_weight += grad.T @ some
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * outer[0] for grad in ctx.saved_tensors]
        return (None, None, *grads)
