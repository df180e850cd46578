"""What the configuration of a model says: how long a text it takes, and which layers it has."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

UNBOUNDED = 1 << 30  # positions of a model whose context has no end
LONGROPE = "longrope"
SPARE = 64  # slots that a cache may have behind its longest text


def rope_settings(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """How rotary positions are scaled, once for each kind of layer; empty for other positions."""
    settings = getattr(config.get_text_config(), "rope_parameters", None)
    if not isinstance(settings, Mapping) or not settings:
        return []
    return [one for one in settings.values() if isinstance(one, Mapping)] or [settings]


def rope_types(config: PreTrainedConfig) -> list[str]:
    """The names of `rope_settings`."""
    return sorted({str(one.get("rope_type", "default")) for one in rope_settings(config)})


def context_of(config: PreTrainedConfig) -> int:
    """The tokens of the longest text that a model of `config` takes.

    LongRoPE (2402.13753) has two sets of frequencies. transformers takes the long one for a whole
    batch as soon as one text passes the original context, and keys that were cached before keep the
    short one. So texts end there, and the short set serves them all.
    """
    text = config.get_text_config()
    declared = getattr(text, "max_position_embeddings", None) or UNBOUNDED
    if declared == UNBOUNDED and (slots := getattr(text, "max_seq_len", None)):
        declared = slots - SPARE  # of MPT, whose biases are for so many slots of a cache
    name = "original_max_position_embeddings"
    borders = [
        one.get(name) or getattr(text, name, None) or declared
        for one in rope_settings(text)
        if one.get("rope_type") == LONGROPE
    ]
    return int(min([declared, *borders]))


def layer_count(config: PreTrainedConfig) -> int:
    """The layers of a model of `config`; of an encoder-decoder one those of its decoder."""
    counts: Any = config if config.is_encoder_decoder else config.get_text_config()
    return int(counts.num_decoder_layers if config.is_encoder_decoder else counts.num_hidden_layers)


def layer_stack(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name in `model` of the layers that write text, and these; an encoder or a vision tower
    may have as many. Raises ValueError for a model that holds them otherwise.
    """
    count, decoder = layer_count(model.config), model.get_decoder()
    inside = {*decoder.modules()}
    for name, module in model.named_modules():  # the outermost comes first
        if isinstance(module, nn.ModuleList) and len(module) == count and module in inside:
            return name, module
    raise ValueError(
        f"draft.shrink.layers: {model.config.model_type} has no list of its {count} layers, and "
        "cannot be cut or split: give a drafter as draft.path"
    )
