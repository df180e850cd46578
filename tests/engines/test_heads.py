"""Heads in real engines: the answers stay, and each accepts what the formulas of the format say.

Run by `pytest -m engines` after `make engines`; an engine that is not installed is skipped.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftkit.config import SamplingConfig
from draftkit.engines.counters import Server
from tests.engines.environments import missing
from tests.engines.heads import (
    Head,
    features_of,
    fitted,
    parallel,
    proposals,
    rounds,
    shuffled,
    swapped,
)
from tests.engines.pairs import EMBEDDED, text_rows
from tests.engines.servers import NOTHING, Launch, convert_head, serving

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS, LENGTH, TOKENS, GAMMA = 20, 16, 32, 3
IDS, MASK = 1024, 4095  # that a head proposes; of the masks
GREEDY = {"sampling": SamplingConfig(temperature=0.0), "limit": TOKENS, "seed": 0}


class Made(NamedTuple):
    """heads by name. texts [PROMPTS, T]: greedy answers of the target with their prompts, longer by
    GAMMA than the engines' answers. features [PROMPTS, T, 3 H]. ends: of text."""

    heads: dict[str, Head]
    texts: Tensor
    features: Tensor
    end: int


@pytest.fixture(scope="module")
def made() -> Made:
    """Heads of the embedded target."""
    target: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    rows = text_rows(100)
    prompts, others = rows[:PROMPTS, :LENGTH], rows[PROMPTS:]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts, own = (
        target.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=n, **options)
        for given, n in ((prompts, TOKENS + GAMMA), (others[:, :32], 64))
    )
    frequent = own.flatten().bincount(minlength=target.config.vocab_size).topk(IDS).indices
    head = fitted(target, torch.cat([own, others[:, 32:]]), ids=frequent.sort().values)
    heads = {
        "its own": head,
        "of all ids": fitted(target, own, ids=torch.arange(target.config.vocab_size)),
        "parallel": parallel(head, features_of(target, own)[0], token=MASK),
        "random": shuffled(head),
        "swapped": swapped(head),
    }
    return Made(heads, texts, features_of(target, texts)[0], target.config.eos_token_id)
