"""What the weights of a plan take, by the shapes of its models, and the one refusal by memory.

Of served models the weights as they are loaded, of trained ones gradients and moments too, and
nothing else: what is refused here cannot run, whatever its texts. What a stage takes besides, the
dry run (`limit=3`) measures.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from draftkit.config import Config
from draftkit.distillation.pretrain import DRAFT_IDS, fresh_config
from draftkit.distillation.ranks import is_first
from draftkit.models.devices import free_bytes, resolve_device, resolve_dtype
from draftkit.models.files import ModelFolder
from draftkit.models.heads import MEDUSA, head_config
from draftkit.models.loading import weight_count
from draftkit.models.shrink import cut_shape

from .product import Product

FLOAT32 = 4  # bytes of a drafter's weight while it learns
TRAINED = 16  # bytes of a weight that learns: itself, its gradient, two moments
SMALLER_TARGET = "hardware.dtype=bfloat16 halves the target's, or give a smaller one"
SMALLER_DRAFT = "give a smaller drafter, or draft.lora.rank=16, which trains a small part of it"
REMEDIES = dict.fromkeys(("generate", "contexts", "scores", "evaluate"), SMALLER_TARGET)
REMEDIES |= {"prepare": "give a smaller drafter, or draft.shrink.layers", "train": SMALLER_DRAFT}


def gigabytes(count: float) -> str:
    """As text, with two figures or more."""
    size = count / 1e9
    return f"{size:.0f} GB" if size >= 9.95 else f"{size:.1f} GB" if size >= 0.095 else "< 0.1 GB"


def pair_shapes(config: Config) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Those of target and draft, of files or to be made. ValueError naming what is not there."""
    draft, whole = config.draft, ModelFolder(config.target).config
    if draft.path:
        return whole, ModelFolder(draft).config
    if draft.is_head:
        text: Any = whole.get_text_config()
        traits = {"medusa_heads": draft.head.tokens} if draft.kind == MEDUSA else {}
        ids = draft.head.vocabulary or DRAFT_IDS
        count = min(ids, text.vocab_size)
        return whole, head_config(whole, draft.kind, draft_ids=count, **traits)
    if draft.shrink.layers:
        return whole, cut_shape(whole, draft.shrink.layers)
    return whole, fresh_config(draft.pretrain, whole, whole.get_text_config().vocab_size)


def stage_bytes(config: Config, *, here: bool) -> dict[str, float]:
    """What weights, gradients and moments of each stage with models take at least.

    Not `here`: as on a card that computes in bfloat16.
    """
    target, draft = map(weight_count, pair_shapes(config))
    served = torch.bfloat16
    if here:
        served = resolve_dtype(config.hardware, resolve_device(config.hardware))
    held, proposing = target * served.itemsize, draft * served.itemsize
    # What LoRA trains is a share of the weights too small to count.
    learning = (FLOAT32 if config.draft.lora.rank else TRAINED) * draft
    judged = 2 if config.evaluate.draft == "trained" else 1
    scoring = 0 if config.scored_by_engine else held
    cold = held + FLOAT32 * draft if config.draft.is_head else held
    return {
        "prepare": cold if config.draft.is_untrained else TRAINED * draft,
        **dict.fromkeys(("generate", "contexts"), 0 if config.target.urls else held),
        "scores": scoring,
        "train": learning + (0 if config.stores_scores else scoring),
        "evaluate": scoring + judged * proposing,
    }


def bytes_of(products: Sequence[Product], *, here: bool) -> dict[str, float]:
    """`stage_bytes` of those that have models: all stages of a plan are of one pair."""
    names = [product.name for product in products if product.name in REMEDIES]
    if not names:
        return {}
    sizes = stage_bytes(products[0].config, here=here)
    return {name: sizes[name] for name in names}


def refuse_too_large(products: Sequence[Product]) -> None:
    """Raise ValueError for a stage whose weights, gradients and moments exceed the free memory.

    A target that is split over processes is not looked at.
    """
    if not is_first() or not products or products[0].config.hardware.shard_target:
        return
    free = free_bytes(resolve_device(products[0].config.hardware))
    for name, needed in bytes_of(products, here=True).items():
        if needed > free:
            raise ValueError(
                f"{name} takes {gigabytes(needed)} of memory for weights, gradients and moments "
                f"alone, and {gigabytes(free)} are free: {REMEDIES[name]}"
            )


def on_a_card(products: Sequence[Product]) -> str:
    """What the largest of the stages takes on a card: one line, empty where none has a model."""
    needed = bytes_of(products, here=False)
    if not needed:
        return ""
    name = max(needed, key=needed.__getitem__)
    size = gigabytes(needed[name])
    return f"on a card: {size} of weights (bfloat16), gradients and moments ({name})"
