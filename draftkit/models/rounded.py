"""A target in 4 bits: its weights rounded to what a packed product reads, and that product.

A pass of few tokens on a CPU takes the time of reading the weights. `round_weights` makes of a
model another one: `GROUP` weights in a row of a matrix have sixteen levels. The output head stays
as it is. Everything reads the rounded weights as those of any model. Beside them the folder holds
their levels, from which a target computes passes of few tokens (`pack`): the same weights to the
last bit, in a third of the bytes. So the law of what is served is that of the rounded model.

Shapes: O outputs, I inputs of a matrix, N tokens, G = I / GROUP groups of a row.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

VERSION = 1  # of the folders: raise it when the same model gives another one
# Beside the weights: the levels of each matrix, and its grids. Engines read all *.safetensors.
LEVELS = "levels.int4"
GROUP = 32  # weights with a grid of their own, as in llama.cpp's blocks
OUTPUTS = 16  # the product takes a multiple of them
MOST_TOKENS = 8  # of a pass: from more on reading the weights is not what takes the time
AT_ONCE = 4  # tokens, by the product: five take half as long again


def matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The matrices that are rounded, by name: all whose shape the product takes, but the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            outputs, inputs = module.weight.shape
            if inputs % GROUP == 0 and outputs % OUTPUTS == 0:
                yield name, module


def grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest level [O, I] (0 to 15) of each weight [O, I], and the grids [G, O, 2], bfloat16.

    A level q of a grid (s, z) stands for (q - 8) s + z. The grid of a group spans its weights, so
    weights that lie on one of sixteen levels come back.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))  # [O, G, GROUP]
    least, most = groups.amin(-1), groups.amax(-1)
    steps = ((most - least) / 15).bfloat16()
    middles = (least + 8 * steps.float()).bfloat16()
    step, middle = steps.float()[..., None], middles.float()[..., None]
    levels = ((groups - middle) / step.clamp(min=1e-30) + 8).round().clamp(0, 15)
    grids = torch.stack([steps, middles], -1).transpose(0, 1).contiguous()
    return levels.flatten(-2).to(torch.uint8), grids


def weights_of(levels: Tensor, grids: Tensor) -> Tensor:
    """The weights [O, I], in bfloat16, that `levels` [O, I] of `grids` [G, O, 2] stand for."""
    step, middle = grids.float().transpose(0, 1)[..., None, :].unbind(-1)  # [O, G, 1] each
    groups = levels.float().unflatten(-1, (-1, GROUP))
    return ((groups - 8) * step + middle).flatten(-2).bfloat16()


def round_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Round the matrices of `model`, in place; their levels, two in a byte, and grids, by name.

    Raises ValueError where it has no matrix that can be.
    """
    stored: dict[str, Tensor] = {}
    for name, module in matrices(model):
        levels, grids = grid(module.weight.data)
        module.weight.data.copy_(weights_of(levels, grids))
        stored[f"{name}.levels"] = levels[:, ::2] | levels[:, 1::2] << 4
        stored[f"{name}.grids"] = grids
    if not stored:
        raise ValueError(
            f"no matrix of {model.config.model_type} can be rounded: use target.weights=auto"
        )
    return stored


class Packed(nn.Linear):
    """A matrix that passes of few tokens in bfloat16 read from its levels."""

    packed: Tensor
    grids: Tensor

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.numel() // self.in_features
        if tokens > MOST_TOKENS or input.dtype != torch.bfloat16:
            return functional.linear(input, self.weight, self.bias)
        states = input.reshape(tokens, self.in_features)
        product: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
        made = product(states, self.packed, GROUP, self.grids)
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias


def pack(model: PreTrainedModel, file: Path) -> None:
    """Let the matrices of `model`, rounded weights on a CPU, be read from the levels in `file`.

    Raises ValueError where these stand for other weights.
    """
    stored = safetensors.torch.load_file(file)
    for name, module in matrices(model):
        pairs, grids = stored[f"{name}.levels"], stored[f"{name}.grids"]
        levels = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
        if not torch.equal(weights_of(levels, grids), module.weight.data.bfloat16()):
            raise ValueError(f"{file.name} is of other weights than {name}")
        packed: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        module.__class__ = Packed
        module.register_buffer("packed", packed, persistent=False)
        module.register_buffer("grids", grids, persistent=False)


def is_packed(model: PreTrainedModel) -> bool:
    """Whether passes of few tokens in bfloat16 read levels."""
    return any(isinstance(module, Packed) for module in model.modules())
