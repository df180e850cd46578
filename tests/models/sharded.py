"""What each of several processes does that share models, for `test_sharding.py`."""

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.fsdp  # here, lest each process imports it after the fork

from draftkit.artifacts import write_json
from draftkit.config import HardwareConfig, TargetConfig
from draftkit.models.loading import load_target
from draftkit.models.shapes import layer_stack
from draftkit.models.sharding import load_sharded_target, shard_layers
from tests import tiny
from tests.launching import fork_ranks

CPU = torch.device("cpu")
MMAP_THRESHOLD = -3  # the number that glibc's `mallopt` gives it


def shares(architecture):
    """How far a model in parts is from itself as a whole, and how much of it is held here."""
    adapter = tiny.adapter(architecture, seed=3)
    adapter.requires_grad_(False)
    whole = sum(weight.numel() for weight in layer_stack(adapter.model)[1].parameters())
    tokens = torch.randint(1, tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected = adapter.score(tokens, keep)
        shard_layers(adapter.model, device=CPU, dtype=torch.float32)
    found = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):  # measured, trained
        with mode():
            found.append(adapter.score(tokens, keep))
    roots = [layer._get_fsdp_state()._is_root for layer in layer_stack(adapter.model)[1]]
    held = sum(w.to_local().numel() for w in layer_stack(adapter.model)[1].parameters())
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


def own_bytes() -> int:
    """Memory of this process that is no page of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def loaded_in_parts(folder: Path, dtype: str) -> dict[str, float]:
    """In a process of several: the most that loading its part takes, and what it scores.

    Sizes are shares of all layers in `dtype`.
    """
    torch.distributed.init_process_group("gloo")
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # what is freed is given back at once
    model, hardware = TargetConfig(path=str(folder)), HardwareConfig(device="cpu", dtype=dtype)
    done, before = threading.Event(), own_bytes()
    peaks = [before]

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(own_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    adapter = load_sharded_target(model, hardware).adapter
    done.set()
    watching.join()
    layers = [*layer_stack(adapter.model)[1].parameters()]
    size = sum(weight.numel() * weight.dtype.itemsize for weight in layers)
    after = own_bytes()
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.inference_mode():
        mine = adapter.score(tokens, tokens > 0)
        expected = load_target(model, hardware).adapter.score(tokens, tokens > 0)
    torch.distributed.destroy_process_group()
    return {
        "size": size,
        "peak": (max(peaks) - before) / size,
        "held": (after - before) / size,
        "difference": float((mine - expected).abs().max() / expected.abs().max()),
        "itemsize": adapter.dtype.itemsize,
    }


if __name__ == "__main__":  # the ranks' parent is small: it leaves no free memory to use
    folder, dtype = sys.argv[1:]
    torch.set_num_threads(1)
    write_json(Path(folder) / "ranks.json", fork_ranks(loaded_in_parts, Path(folder), dtype))
