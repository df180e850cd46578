"""LoRA (Hu et al. 2106.09685): a draft trained by low-rank updates of its linear layers.

    y = W x + (alpha / rank) B A x       A: [rank, in] random, B: [out, rank] zero at first

Injected into the loaded model by peft, in place: only A and B are open to training, and whoever
holds the model sees the updates at once. What is saved is W + (alpha / rank) B A, a plain model.
Full fine-tuning (`draft.lora.rank=0`) needs nothing of this. The module knows no optimizer and
no loss.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftkit.config.text import LoraConfig
from draftkit.models.adapter import Adapter

SCALE = 2  # of the updates B A


def with_lora(draft: Adapter, lora: LoraConfig, *, seed: int) -> Adapter:
    """Return `draft` with fresh updates in its model, which change no logit before training.

    The model stays the same object; the adapter is a new one, since code compiled for a model
    without updates must not run this one. Rank 0 returns `draft` itself. The same `seed` gives the
    same A.
    """
    if lora.rank == 0:
        return draft
    import peft  # half a second that full fine-tuning does without

    model: Any = draft.model
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=SCALE * lora.rank,
        target_modules=names,
        fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    return draft.rebuilt()


def save_plain(model: PreTrainedModel, folder: Path) -> None:
    """Write the plain model that `model` with its updates is equal to, by `save_pretrained`.

    Its generation_config.json is one that every release of transformers writes.
    """
    given = model.generation_config
    model.generation_config = given and valid_generation(given)
    try:
        model.save_pretrained(folder, state_dict=merged_weights(model))
    finally:
        model.generation_config = given
    # safetensors lets nobody else read weights, whatever the umask: an engine of another user must.
    rights = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(rights)


def valid_generation(given: GenerationConfig) -> GenerationConfig:
    """`given` without the keys that contradict others of it, as a temperature without sampling.

    Transformers loads such a configuration, and some releases refuse to save it.
    """
    valid = GenerationConfig()
    for name in sorted(vars(given), key=lambda name: name not in ("do_sample", "num_beams")):
        before = getattr(valid, name, None)
        setattr(valid, name, getattr(given, name))
        try:
            valid.validate(strict=True)
        except (ValueError, TypeError):
            setattr(valid, name, before)
    return valid


def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict of the plain model that `model` with its updates is equal to.

    `model` stays as it is; weights without an update are its own tensors. A model without LoRA
    gives its state dict.
    """
    weights = model.state_dict()
    if not hasattr(model, "peft_config"):
        return weights
    from peft.tuners.lora import LoraLayer

    for path, layer in list(model.named_modules()):
        if not isinstance(layer, LoraLayer):
            continue
        for name in [name for name in weights if name.startswith(f"{path}.")]:
            weight = weights.pop(name)
            if ".base_layer." in name:
                weights[name.replace(".base_layer.", ".")] = weight
        update: Any = layer
        for adapter in update.active_adapters:
            weights[f"{path}.weight"] = weights[f"{path}.weight"] + update.get_delta_weight(adapter)
    return weights
