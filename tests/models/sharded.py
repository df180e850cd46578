"""What each of several processes does that share models, for `test_sharding.py`."""

from typing import Any

import torch
import torch.distributed

from draftkit.models.sharding import layers_of, shard_layers
from tests import tiny


def shares(architecture):
    """How far a model in parts is from itself as a whole, and how much of it is held here."""
    adapter = tiny.adapter(architecture, seed=3)
    adapter.requires_grad_(False)
    whole = sum(weight.numel() for weight in layers_of(adapter.model).parameters())
    tokens = torch.randint(1, tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected = adapter.score(tokens, keep)
        shard_layers(adapter.model)
    found = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):  # measured, trained
        with mode():
            found.append(adapter.score(tokens, keep))
    roots = [layer._get_fsdp_state()._is_root for layer in layers_of(adapter.model)]
    held = sum(w.to_local().numel() for w in layers_of(adapter.model).parameters())
    return {
        "difference": max(float((one - expected).abs().max()) for one in found),
        "share": held / whole,
        "roots": sum(roots),
    }


def measured(architectures: list[str]) -> list[dict[str, Any]]:
    """`shares` of each, in a process of several."""
    torch.distributed.init_process_group("gloo")
    found = [shares(name) for name in architectures]
    torch.distributed.destroy_process_group()
    return found
