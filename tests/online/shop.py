"""A refit with all that it stands on, of a tiny pair."""

import copy
import dataclasses
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from draftkit.config import (
    BufferConfig,
    DivergenceConfig,
    GateConfig,
    LoraConfig,
    OnlineConfig,
    OptimConfig,
)
from draftkit.distillation.losses import Objective, StoredTeacher
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import save_model
from draftkit.models.lora import with_lora
from draftkit.online.buffer import Buffer
from draftkit.online.gate import Judge
from draftkit.online.refit import Anchors, Refit
from draftkit.online.registry import Registry
from tests import tiny
from tests.online import making

SETTINGS = OnlineConfig(
    min_records=16,
    steps=6,
    recent=32,
    anchor_fraction=0.25,
    buffer=BufferConfig(top_k=making.TOP_K),
    gate=GateConfig(fraction=0.4, records=48, anchors=8, anchor_tolerance=1),
)
OPTIM = OptimConfig(
    learning_rate=0.1, lr_scheduler_type="constant", warmup_steps=0, per_device_train_batch_size=8
)


def start() -> CausalAdapter:
    """A draft that has one thing to learn, and quickly: it is less sure than its target."""
    model = copy.deepcopy(making.target().model)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.4)
    return CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)


def load(folder: Path, lora: int = 0) -> CausalAdapter:
    model = AutoModelForCausalLM.from_pretrained(folder)
    draft = CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)
    if lora == 0:
        model.requires_grad_(False)
        model.model.norm.weight.requires_grad_(True)
    return with_lora(draft, LoraConfig(rank=lora), seed=0)


def make_trainer(folder: Path, lora: int = 0) -> Trainer:
    return Trainer(
        load(folder, lora),
        StoredTeacher(),
        Objective(DivergenceConfig(name="forward_kl"), making.SAMPLING),
        optim=OPTIM,
    )


def save(trainer: Trainer, folder: Path) -> None:
    save_model(trainer.draft.model, tiny.byte_tokenizer(), folder)


def entries(records):
    return [("default", record) for record in records]


class Shop:
    """A refit with all that it stands on, in a folder; opened again it is what a restart sees.

    records: that are served first; changes: of its settings.
    """

    def __init__(self, folder: Path, records=(), *, anchors=None, lora=0, **changes):
        self.settings = dataclasses.replace(SETTINGS, **changes)
        self.buffer = Buffer(
            folder / "buffer.sqlite",
            self.settings.buffer,
            gate_fraction=self.settings.gate.fraction,
        )
        self.buffer.append(entries(records))
        self.registry = Registry(folder / "drafters")
        draft = start()
        self.registry.seed(lambda path: save_model(draft.model, tiny.byte_tokenizer(), path))
        self.refit = Refit(
            route="default",
            buffer=self.buffer,
            registry=self.registry,
            make_trainer=partial(make_trainer, lora=lora),
            save=save,
            judge=Judge(start(), None, batch_size=32),
            anchors=anchors or Anchors(),
            settings=self.settings,
            folder=folder / "refit",
            seed=7,
        )

    def weights(self):
        version = self.registry.current()
        assert version is not None
        return self.registry.read(version)
