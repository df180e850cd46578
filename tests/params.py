"""Rows that are sampled each in its own way, and some of them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from draftkit.theory.warping import SamplingParams


def params_of(settings: Sequence[Mapping[str, Any]]) -> SamplingParams:
    """One row per setting: what `SamplingParams.uniform` takes."""
    rows = [SamplingParams.uniform(1, **one) for one in settings]
    bounds = [row.largest_top_k for row in rows if row.largest_top_k is not None]
    values: dict[str, Any] = {"largest_top_k": max(bounds) if len(bounds) == len(rows) else None}
    for field in fields(SamplingParams):
        column = [getattr(row, field.name) for row in rows]
        if isinstance(column[0], Tensor):
            values[field.name] = torch.cat(column)
        elif field.name not in values:
            values[field.name] = any(column)
    return SamplingParams(**values)


def select(params: SamplingParams, index: Tensor) -> SamplingParams:
    """The rows named by `index` [N] (ids or a mask), in its order."""
    rows = {name: v[index] for name, v in vars(params).items() if isinstance(v, Tensor)}
    return replace(params, **rows)
