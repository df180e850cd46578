"""Attention where PyTorch's fused kernel, as models call it, is slow.

On a CPU in half precision plain products stand in for it. The fused kernel never holds the scores
[T, C], which long texts need. But it goes backward several times slower than the products written
out; where heads share keys these are repeated for it; and without matrix units (AMX) it is no
faster for one query than for many, which decoding asks for in every row. So the products serve
short texts when a gradient is wanted, decoding where heads share keys, and decoding of many rows
where there are no matrix units; all else the fused kernel.

On CUDA too shared keys are repeated for it, where there is a mask, and reading keys is most of what
decoding does. There the query heads that share keys are taken for queries of one head.

Shapes: B rows, N query heads, K key-value heads, T tokens, C keys, D dimensions of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftkit"
LONGEST = 256  # tokens: from 512 on the fused kernel is as fast, and needs far less memory
FEW = 16  # queries of a row: a round of decoding, no prefill
MANY = 24  # rows x heads a query, from which on the products are faster
# With matrix units the fused kernel takes 0.25 to 1.1 of the products' time where no key is shared.
HAS_MATRIX_UNITS = bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_tile"))
HALVES = (torch.bfloat16, torch.float16)
# What a layer may ask for that the products do not do.
OTHERS = ("softcap", "position_bias", "cache", "s_aux")


def fit_to_device(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, which attends in the way that is faster on its device.

    Models that do not attend by the fused kernel, or not through the common interface, stay as
    they are.
    """
    fused = model.config._attn_implementation == "sdpa"
    known = model.device.type in ("cpu", "cuda")
    if fused and known and model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    return model


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: query [B, N, T, D], key and value [B, K, C, D] to [B, T, N, D]."""
    (_, heads, tokens, _), shared = query.shape, key.shape[1]
    products_suffice = dropout == 0 and all(others.get(name) is None for name in OTHERS)
    is_decoding = not query.requires_grad and tokens <= FEW
    groups = query.is_cuda and is_decoding and heads > shared and products_suffice
    if groups and attention_mask is not None:
        mixed = grouped_attention(query, key, value, mask=attention_mask, scaling=scaling)
        return mixed.transpose(1, 2).contiguous(), None
    is_clear = attention_mask is not None or tokens == key.shape[2]  # which keys a query sees
    is_half = query.dtype in HALVES or torch.is_autocast_enabled(query.device.type)
    if not (products_suffice and is_clear and is_half and _is_faster(query, key)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if attention_mask is None and is_causal:
        attention_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    mixed = plain_attention(query, key, value, mask=attention_mask, scaling=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _is_faster(query: Tensor, key: Tensor) -> bool:
    """Whether the products are: measured on two cores with AVX512-BF16, without and with AMX."""
    rows, heads, tokens, _ = query.shape
    if query.is_cuda:
        return False
    if query.requires_grad:
        return tokens == key.shape[2] <= LONGEST
    many = rows * heads >= MANY * tokens and not HAS_MATRIX_UNITS
    return tokens <= FEW and (heads > key.shape[1] or many)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, scaling: float | None
) -> Tensor:
    """The fused kernel on query heads that share keys, as queries of one head: [B, N, T, D].

    mask: [B or 1, 1, T, C], bool (true: seen) or to be added. Keys are read where they lie.
    """
    (rows, heads, tokens, _), shared = query.shape, key.shape[1]
    size = heads // shared
    mixed = functional.scaled_dot_product_attention(
        query.unflatten(1, (shared, size)).flatten(2, 3),
        key,
        value,
        attn_mask=mask.expand(rows, 1, tokens, -1).repeat(1, 1, size, 1),
        scale=scaling,
    )
    return mixed.unflatten(2, (size, tokens)).flatten(1, 2)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """softmax(scaling * query @ key^T + mask) @ value, [B, N, T, D]; scaling: default D ** -0.5.

    mask: broadcastable to [B, N, T, C], bool (true: seen) or to be added.
    """
    heads, shared = query.shape[1], key.shape[1]
    # Query heads that share keys are rows of one product, so that keys are not repeated.
    grouped = query.unflatten(1, (shared, heads // shared)).flatten(2, 3)
    scores = (grouped * (scaling or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    scores = scores.unflatten(2, (heads // shared, -1)).flatten(1, 2)  # [B, N, T, C]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = scores.softmax(-1)
    mixed = weights.unflatten(1, (shared, -1)).flatten(2, 3) @ value
    return mixed.unflatten(2, (heads // shared, -1)).flatten(1, 2)


def unrolled_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], *, mask: Tensor
) -> Tensor:
    """What each index attends to at a later step: [B, T, N, D] of `query` [B, N, T, D].

    keys, values: of all steps so far. Of the first [B, G, C, D] those that `mask` [B or 1, 1, T, C]
    leaves, of each later one [B, G, T, D] the key of the index itself.
    """
    (_, heads, tokens, size), shared = query.shape, keys[0].shape[1]
    grouped = (query * size**-0.5).unflatten(1, (shared, heads // shared))
    first = grouped.flatten(2, 3) @ keys[0].transpose(-1, -2)
    scores = first.unflatten(2, (-1, tokens)) + mask[:, :, None].to(first.dtype)
    own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    seen = keys[0].shape[2]
    mixed = (weights[..., :seen].flatten(2, 3) @ values[0]).unflatten(2, (-1, tokens))
    for step, value in enumerate(values[1:], seen):
        mixed = mixed + weights[..., step : step + 1] * value[:, :, None]
    return mixed.flatten(1, 2).transpose(1, 2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
