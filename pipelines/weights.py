"""What the weights of a plan take, by the shapes of its models, and the one refusal by memory.

Of served models the weights as they are loaded, of trained ones gradients and moments too, and
nothing else: what is refused here cannot run, whatever its texts. What a stage really takes is
measured by the dry run (`limit=3`).
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from draftkit.config import Config, ModelConfig
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.loading import dtype_named, llama_config, model_config
from draftkit.models.memory import free_bytes, weight_count
from draftkit.models.shrink import chosen_layers

from .product import Product

FLOAT32 = 4  # bytes of a drafter's weight while it learns
TRAINED = 16  # bytes of a weight that learns: itself, its gradient, two moments
WITH_MODELS = ("target", "prepare", "generate", "contexts", "scores", "train", "evaluate")
SMALLER_TARGET = "target.dtype=bfloat16 halves the target's, or give a smaller one"
SMALLER_DRAFT = "give a smaller drafter, or draft.lora.rank=16, which trains a small part of it"
REMEDIES = {"target": "give target.pretrain a smaller shape"}
REMEDIES |= {"prepare": "give a smaller drafter, or draft.shrink.layers", "train": SMALLER_DRAFT}


class Weights(NamedTuple):
    """A model by the number of its weights, and bytes as it is served."""

    count: int
    served: int


def gigabytes(count: float) -> str:
    """As text, with two figures or more."""
    size = count / 1e9
    return f"{size:.0f} GB" if size >= 9.95 else f"{size:.1f} GB" if size >= 0.095 else "< 0.1 GB"


def pair_shapes(config: Config) -> dict[str, PreTrainedConfig]:
    """Those of target and draft, of files or to be made. ValueError naming what is not there."""
    given = {key: getattr(config, key) for key in ("target", "draft")}
    shapes = {key: model_config(one) for key, one in given.items() if one.path is not None}
    if "target" not in shapes:
        shapes["target"] = llama_config(config.target.pretrain, config.data.vocab_size)
    whole, cut = shapes["target"], config.draft.shrink.layers
    if "draft" not in shapes and cut:
        shapes["draft"] = type(whole).from_dict(whole.to_dict())
        text = shapes["draft"].get_text_config()
        layers = chosen_layers(cut, text.num_hidden_layers)
        text.num_hidden_layers = len(layers)
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[one] for one in layers]
    elif "draft" not in shapes:
        size = whole.get_text_config().vocab_size
        shapes["draft"] = llama_config(config.draft.pretrain, size)
    return shapes


def pair_weights(config: Config, *, here: bool = True) -> dict[str, Weights]:
    """Of target and draft. Not `here`: as on a card that computes in bfloat16."""
    device = resolve_device(config.hardware)
    served = resolve_dtype(config.hardware, device) if here else torch.bfloat16

    def weights(key: str, shape: PreTrainedConfig) -> Weights:
        model: ModelConfig = getattr(config, key)
        count = weight_count(shape)
        dtype = dtype_named(model) or served
        # On a CPU weights of the same dtype are pages of their files, and no memory of the process.
        stored = shape.dtype if model.path is not None else None
        mapped = here and device.type == "cpu" and stored in (dtype, None)
        return Weights(count, 0 if mapped else count * dtype.itemsize)

    return {key: weights(key, shape) for key, shape in pair_shapes(config).items()}


def stage_bytes(name: str, config: Config, pair: Mapping[str, Weights]) -> float:
    """What weights, gradients and moments of a stage take at least; nothing of one without."""
    target, draft, shrink = pair["target"], pair["draft"], config.draft.shrink
    # What LoRA trains is a share of the weights too small to count.
    learns = 0 if config.draft.lora.rank else draft.count
    training = FLOAT32 * draft.count + (TRAINED - FLOAT32) * learns
    judged = 2 if config.evaluate.draft == "trained" else 1
    return {
        "target": TRAINED * target.count,
        "prepare": TRAINED * draft.count if shrink.steps or not shrink.layers else target.served,
        "generate": 0 if config.generate.engine == "openai" else target.served,
        "contexts": target.served,
        "scores": target.served,
        "train": training + (0 if config.generate.top_k else target.served),
        "evaluate": target.served + judged * draft.served,
    }.get(name, 0)


def bytes_of(products: Sequence[Product], *, here: bool) -> dict[str, float]:
    """`stage_bytes` by name: all stages of a plan are of one pair."""
    if not any(product.name in WITH_MODELS for product in products):
        return {}
    pair = pair_weights(products[0].config, here=here)
    return {one.name: stage_bytes(one.name, one.config, pair) for one in products}


def refuse_too_large(products: Sequence[Product]) -> None:
    """Raise ValueError for a stage whose weights, gradients and moments exceed the free memory.

    A target that is split over processes is not looked at.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    if not first or not products or products[0].config.hardware.shard_target:
        return
    free = free_bytes(resolve_device(products[0].config.hardware))
    for name, needed in bytes_of(products, here=True).items():
        if needed > free:
            raise ValueError(
                f"{name} takes {gigabytes(needed)} of memory for weights, gradients and moments "
                f"alone, and {gigabytes(free)} are free: {REMEDIES.get(name, SMALLER_TARGET)}"
            )


def on_a_card(products: Sequence[Product]) -> str:
    """What the largest of the stages takes on a card: one line, empty where none has a model."""
    needed = bytes_of(products, here=False)
    if not needed:
        return ""
    name, count = max(needed.items(), key=lambda item: item[1])
    return f"on a card: {gigabytes(count)} of weights (bfloat16), gradients and moments ({name})"
