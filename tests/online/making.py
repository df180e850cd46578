"""Traffic of a tiny pair: answers of the target with its stored scores."""

import dataclasses
from collections.abc import Sequence

import torch

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.scores import stored_scores
from draftkit.evaluation.alpha import PromptTotals
from draftkit.models.adapter import CausalAdapter
from tests import tiny
from tests.distillation.making import sampler_of

SAMPLING = SamplingConfig()
TOP_K = 8


def target() -> CausalAdapter:
    return tiny.adapter(seed=2)


def traffic(count: int, *, first: int = 0, length: int = 12) -> list[Record]:
    """Answers to prompts that differ, the same for the same numbers."""
    prompts = [tiny.prompts([4 + row % 3], seed=row)[0] for row in range(first, first + count)]
    model = target()
    limits = {"max_new_tokens": length, "max_length": 64, "batch_size": 64, "seed": 5}
    sampler = sampler_of(model, sampling=SAMPLING, **limits)
    records = sampler.sample(prompts, rows=range(first, first + count), version="target")
    return stored_scores(model, records, k=TOP_K, loss_temperature=1.0)


def refused(record: Record, places: Sequence[int]) -> Record:
    """`record` as a server stores it that refused the proposals at `places`."""
    rejected = [place in places for place in range(len(record.output_ids))]
    return dataclasses.replace(record, proposals=[1] * len(rejected), rejected=rejected)


def totals(alphas: Sequence[float], positions: int = 10) -> PromptTotals:
    """Prompts with these alphas."""
    values = torch.tensor(alphas, dtype=torch.float64)
    counts = torch.full_like(values, positions)
    return PromptTotals({"alpha": values * positions}, counts)
