"""Folders of heads: read whole, beside the target that they belong to, or refused in one line.

Those of other trainers are read where all engines compute the same of them (`NOT_PORTABLE`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from draftkit.artifacts import first_line
from draftkit.config import PARD, PLAIN, DraftConfig
from draftkit.models.adapter import Adapter
from draftkit.models.heads import (
    EAGLE3,
    HeadAdapter,
    adapted,
    head_class,
    layers_read,
)
from draftkit.models.parallel import ENCODER_DECODER, parallel_of
from draftkit.models.shapes import layer_count

# What engines read in ways of their own, or not at all, with the only value that all agree on.
NOT_PORTABLE: Mapping[str, Any] = {
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
    "num_hidden_layers": 1,
    "hidden_act": "silu",
}
LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "layer_ids")  # at the top, or in `eagle_config`
P_EAGLE = "p-eagle"  # what summaries call a head of `draft.head.parallel`
UNREAD = ("t2d",)  # what follows from d2t
OTHER_NAMES = {"midlayer.": "layers.0."}
EMBEDDINGS = "embed_tokens.weight"


def kind_of_head(config: PreTrainedConfig) -> str:
    """The `draft.kind` of a head by its configuration."""
    made = head_class(config)
    assert made is not None
    return made.kind


def kind_of(config: PreTrainedConfig) -> str:
    """The kind of any drafter by its configuration, as summaries name it."""
    if config.is_encoder_decoder:
        return ENCODER_DECODER
    in_one_pass = parallel_of(config) is not None
    if head_class(config) is None:
        return PARD if in_one_pass else PLAIN
    return P_EAGLE if in_one_pass else kind_of_head(config)


def load_head(
    model: DraftConfig, config: PreTrainedConfig, target: Adapter, *, dtype: torch.dtype
) -> HeadAdapter:
    """The head of `config` in the folder of `model`, beside its `target`, in `dtype`.

    Raises ValueError, one line, for one of another target or with options that engines read in
    ways of their own, and for a folder that is not whole.
    """
    where = model.named
    check_head(where, config, target.model.config)
    weights = _weights(model, where)
    shared: Any = target.model.get_input_embeddings()
    if EMBEDDINGS not in weights and config.hidden_size != shared.weight.shape[1]:
        raise ValueError(
            f"{where}: it lacks {EMBEDDINGS}, and is {config.hidden_size} wide where those of the "
            f"target are {shared.weight.shape[1]}: give a whole folder of a head"
        )
    made: Any = head_class(config)
    head: Any = made._from_config(config, dtype=dtype)
    own = weights.pop(EMBEDDINGS, None)
    if "lm_head.weight" not in weights and not hasattr(head, "d2t"):
        outputs: Any = target.model.get_output_embeddings()
        weights["lm_head.weight"] = outputs.weight
    expected = head.state_dict()
    if "d2t" not in expected and not weights.get("d2t", torch.ones(1)).any():
        del weights["d2t"]  # all ids, each as itself
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            fault = "lacks" if name in expected else "has, beyond those of an EAGLE-3 head,"
            raise ValueError(f"{where}: it {fault} {name}: give a whole folder of a head")
        if weights[name].shape != expected[name].shape:
            shapes = f"{[*weights[name].shape]} and not {[*expected[name].shape]}"
            raise ValueError(f"{where}: {name} is {shapes}: give a head of this target")
    head.load_state_dict(weights)
    head = head.to(target.device).eval()
    if own is not None and not torch.equal(own.to(shared.weight), shared.weight):
        rows = own.to(target.device, shared.weight.dtype)
        head.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=True)
    adapter = adapted(head, target=target)
    ids = adapter.kept_ids
    if ids is not None and not (
        0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size and len(ids.unique()) == len(ids)
    ):
        raise ValueError(
            f"{where}: d2t must name ids below {target.vocab_size}, none twice: give a head of "
            "this target"
        )
    return adapter


def check_head(where: str, config: Any, target: PreTrainedConfig) -> None:
    """Raise ValueError for a head of another target, or one that engines read differently."""
    text: Any = target.get_text_config()
    if target.is_encoder_decoder:
        raise ValueError(
            f"{where}: a head reads a decoder-only target, and this one is an encoder-decoder model"
        )
    count, kind = layer_count(target), kind_of_head(config)
    read = layers_read(kind, count)
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    for name, own, needed in (
        ("hidden_size", width, text.hidden_size),
        ("vocab_size", config.vocab_size, text.vocab_size),
    ):
        if own != needed:
            raise ValueError(
                f"{where}: {name} is {own} and the target's {needed}: it is a head of another "
                "target"
            )
    if getattr(config, "draft_vocab_size", None) is None:
        config.draft_vocab_size = config.vocab_size
    if not 0 < config.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"{where}: draft_vocab_size is {config.draft_vocab_size}, of {config.vocab_size} ids"
        )
    declared = {**vars(config), **(getattr(config, "eagle_config", None) or {})}
    for name, only in NOT_PORTABLE.items():
        if (value := declared.get(name, only)) != only and kind == EAGLE3:
            raise ValueError(
                f"{where}: {name} is {value!r}, which engines read in different ways: give a head "
                f"with {only!r}"
            )
    for name in LAYER_IDS:
        if (ids := declared.get(name)) is not None and tuple(ids) != read:
            raise ValueError(
                f"{where}: {name} names the layers {ids}, and engines read {[*read]} where nothing "
                "is named: give a head of those"
            )


def _weights(model: DraftConfig, where: str) -> dict[str, Tensor]:
    """The weights of the head's folder, by the names that ours have."""
    try:
        name = "model.safetensors"
        weights = load_file(str(cached_file(model.location, name, revision=model.revision)))
    except Exception as error:  # what a missing or damaged file raises has no bound
        raise ValueError(
            f"{where}: cannot read its model.safetensors ({first_line(error)}): give a whole "
            "folder of a head"
        ) from error
    renamed = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        for other, own in OTHER_NAMES.items():
            name = own + name.removeprefix(other) if name.startswith(other) else name
        if name not in UNREAD:
            renamed[name] = weight
    return renamed
