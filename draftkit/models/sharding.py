"""A frozen model too large for one device, its layers split over all processes (FSDP2).

Every process holds a part of each layer's weights and gathers a layer when it passes through it.
Embeddings and head stay whole, since losses make logits of states without passing through the
model. All processes must pass through together: sharded models score batches, they do not decode.
"""

from typing import Any

import torch
import torch.distributed
from torch import nn


def shard_layers(model: Any) -> None:
    """Split the layers of `model` over the processes of this group, in place.

    Raises ValueError where there is but one process.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        raise ValueError(
            "hardware.shard_target: there is one process, and nobody to share the target with: "
            "use `accelerate launch --num_processes N -m draftkit distill ...`, or false"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    layers, stack = layers_of(model), model.base_model
    whole = {*model.parameters()} - {*layers.parameters()}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # One root over all layers: a layer is then gathered while the one before it computes.
    fully_shard(stack, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    # Without gradients, but never in inference mode, where alpha is measured: layers gather their
    # weights into buffers that outlive the call, and a training step could not write to them.
    stack.forward = torch.inference_mode(False)(torch.no_grad()(stack.forward))


def layers_of(model: Any) -> nn.ModuleList:
    """The stack of transformer layers: the outermost list with as many entries as there are."""
    count = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(stack for stack in lists if len(stack) == count)
