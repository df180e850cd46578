"""A frozen model too large for one device, its layers split over all processes (FSDP2).

It is loaded mapped: its weights are pages of the files, which are read where they are used, and
which processes of one machine share. Then layer after layer is moved and split, so that a process
never holds more than its part and one layer.

Every process holds a part of each layer's weights and gathers a layer when it passes through it.
Embeddings and head stay whole, since losses make logits of states without passing through the
model. All processes must pass through together: sharded models score batches, they do not decode.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from draftkit.config import HardwareConfig, TargetConfig
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.loading import Target, load_target
from draftkit.models.shapes import layer_stack


def load_sharded_target(model: TargetConfig, hardware: HardwareConfig) -> Target:
    """`load_target` of a model of which each process of this group gets its part.

    Raises ValueError as that does, and where there is but one process.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        raise ValueError(
            "hardware.shard_target: there is no second process to share the target with: "
            "use `accelerate launch --num_processes N -m draftkit distill ...` (without GPUs: "
            "`python -m torch.distributed.run --nproc_per_node N -m ...`), or false"
        )
    device = resolve_device(hardware)
    dtype = resolve_dtype(hardware, device)
    mapped = replace(hardware, device="cpu")
    # Any other dtype would be a copy of the whole, and passes would read all of it.
    target = load_target(model, mapped, dtype="auto", probed=False)
    shard_layers(target.adapter.model, device=device, dtype=dtype)
    return replace(target, dtype=dtype, device=device)


def shard_layers(model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Split the layers of `model` over the processes of this group, in place, on `device`.

    What is no layer is moved there whole. Weights become `dtype`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    layers, stack = layer_stack(model)[1], model.base_model
    whole = {*model.parameters()} - {*layers.parameters()}
    for layer in layers:
        _move(layer.parameters(), layer.buffers(), device, dtype)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    _move(whole, model.buffers(), device, dtype)
    # One root over all layers: a layer is then gathered while the one before it computes.
    fully_shard(stack, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    # Without gradients, but never in inference mode, where alpha is measured: layers gather their
    # weights into buffers that outlive the call, and a training step could not write to them.
    stack.forward = torch.inference_mode(False)(torch.no_grad()(stack.forward))


def _move(
    weights: Iterable[Tensor], buffers: Iterable[Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Move tensors in place; buffers keep their dtype, as in loading."""
    for weight in weights:
        weight.data = weight.data.to(device, dtype)
    for buffer in buffers:
        buffer.data = buffer.data.to(device)
