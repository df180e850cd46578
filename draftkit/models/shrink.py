"""A drafter cut out of its target: some of its layers, and the ids that are worth proposing.

Chosen layers, embeddings, final norm and head of the target make a smaller model of the same
architecture, which speaks the target's language before it has learnt anything. The layers of an
encoder-decoder model are those of its decoder; the encoder stays whole. Over a large vocabulary the
head is what a small drafter spends its time on: proposing the most frequent ids alone (FR-Spec
2502.14856, VocabTrim 2506.22694) leaves q = 0 for all others, which costs acceptance and no
exactness. The ids lie in a file beside a head that stays whole; `adapter` applies them.

Shapes: K kept ids, V real vocabulary.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from draftkit.models.shapes import layer_count, layer_stack


def chosen_layers(layers: int | Sequence[int], count: int) -> list[int]:
    """Those of a model's `count` layers that `layers` names, or so many: half of them, rounded up,
    from the front, the rest from the end.

    Raises ValueError unless they are numbers of its layers, ascending.
    """
    if isinstance(layers, int):
        front = layers - layers // 2
        chosen = [*range(front), *range(max(front, count - layers // 2), count)]
        if 0 < layers <= count:
            return chosen
    elif layers and list(layers) == sorted({*layers} & {*range(count)}):
        return list(layers)
    raise ValueError(
        f"draft.shrink.layers: the target has {count} layers, numbered 0 to {count - 1}; "
        f"name some of them in ascending order, none twice, or how many, not {layers}"
    )


def cut_shape(config: PreTrainedConfig, layers: int | Sequence[int]) -> PreTrainedConfig:
    """The shapes of a model that has the `chosen_layers` of one of `config`, all else as there.

    Raises ValueError as `chosen_layers` does.
    """
    chosen, count = chosen_layers(layers, layer_count(config)), layer_count(config)
    cut = copy.deepcopy(config)
    counts: Any = cut if cut.is_encoder_decoder else cut.get_text_config()
    for name, value in list(vars(counts).items()):
        # A list of ids may be as long as there are layers: the name tells them apart.
        if isinstance(value, list) and len(value) == count and "layer" in name:
            setattr(counts, name, [value[layer] for layer in chosen])
    name = "num_decoder_layers" if cut.is_encoder_decoder else "num_hidden_layers"
    setattr(counts, name, len(chosen))
    return cut


def shrink(target: PreTrainedModel, layers: int | Sequence[int]) -> PreTrainedModel:
    """Return a model of the `chosen_layers` of `target`, all else copied.

    It has the dtype and device of `target`, and no tensor in common with it. Raises ValueError
    naming `draft.shrink.layers` for other numbers than the target's, and for a target that builds
    some layers otherwise once their numbers change.
    """
    config = cut_shape(target.config, layers)
    layers = chosen_layers(layers, layer_count(target.config))
    with torch.random.fork_rng(devices=[]):  # the first weights are random, and overwritten
        made: Any = type(target)._from_config(config, dtype=target.dtype)
    own = made.state_dict()
    prefix = f"{layer_stack(target)[0]}."  # of an encoder-decoder model: the encoder stays whole
    weights = {}  # without the other layers, the chosen ones numbered from 0
    for name, weight in target.state_dict().items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) not in layers:
                continue
            name = f"{prefix}{layers.index(int(number))}.{rest}"
        weights[name] = weight
    strange = sorted(
        name
        for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    )
    if strange:
        raise ValueError(
            f"draft.shrink.layers: {target.config.model_type} makes layers by their number "
            f"(first: {strange[0]}), and cannot be cut: give a drafter as draft.path"
        )
    made.load_state_dict(weights)
    made.generation_config = copy.deepcopy(target.generation_config)
    return made.to(target.device).eval()


# Kept ids


def check_vocabulary(
    count: int, vocab_size: int, *, key: str = "draft.shrink.vocabulary", everything: str = "0"
) -> None:
    """Raise ValueError naming `key`, of which `everything` takes all ids, if `count` ids are more
    than there are."""
    if count > vocab_size:
        raise ValueError(
            f"{key}: {count} of {vocab_size} ids cannot be kept: lower it, or use {everything} "
            "for all"
        )


def frequent_ids(
    *groups: Iterable[Sequence[int]], count: int, always: Iterable[int], vocab_size: int
) -> Tensor:
    """Return the `count` ids most frequent in the texts of `groups`, and those of `always`: [K].

    Each group has the same weight, whatever it holds. Ascending; of ids that are equally frequent
    the smaller is kept, so that a short text gives no fewer. Raises ValueError naming
    `draft.shrink.vocabulary` for more ids than `vocab_size`.
    """
    check_vocabulary(count, vocab_size)
    shares: Counter[int] = Counter()
    for texts in groups:
        seen = Counter(chain.from_iterable(texts))
        total = max(1, seen.total())
        for token, times in seen.items():
            shares[token] += times / total  # pyrefly: ignore[unsupported-operation]
    ranked = sorted(range(vocab_size), key=lambda token: (-shares[token], token))
    kept = {*ranked[:count], *(token for token in always if token < vocab_size)}
    return torch.tensor(sorted(kept), dtype=torch.int64)


def share_of_tokens(sequences: Iterable[Sequence[int]], kept_ids: Tensor) -> float:
    """Return the share of all tokens of `sequences` that are among `kept_ids` [K]."""
    seen = Counter(chain.from_iterable(sequences))
    return sum(seen[token] for token in kept_ids.tolist()) / max(1, seen.total())


def read_kept_ids(path: Path, vocab_size: int) -> Tensor:
    """The ids [K] in the file `path` of a draft. Raises ValueError for anything else: one line."""
    with suppress(ValueError, OSError):
        ids = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
        if whole and ids == sorted({*ids}) and ids[0] >= 0 and ids[-1] < vocab_size:
            return torch.tensor(ids)
    raise ValueError(
        f"draft.path {path}: it must hold a list of ids below {vocab_size}, ascending: give the "
        "folder as prepare or distill wrote it"
    )
