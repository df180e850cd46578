"""Dropout is at work in training alone, and a run that is resumed repeats its noise."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from draftkit.config import DivergenceConfig, OptimConfig
from draftkit.distillation import losses
from draftkit.distillation import trainer as training
from draftkit.distillation.assembly import checkpoint_activations
from draftkit.distillation.batch import TokenSequence
from draftkit.distillation.loop import train
from draftkit.distillation.losses import Objective, TargetTeacher
from draftkit.distillation.sources import Source, shuffled
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import CausalAdapter
from draftkit.theory.divergences import DIVERGENCES, Divergence
from tests import tiny
from tests.distillation.bigram import CPU
from tests.distillation.making import Killed

TEXTS = [
    TokenSequence(ids, [i >= 2 for i in range(len(ids))])
    for ids in tiny.prompts([6 + 3 * (row % 4) for row in range(8)], seed=3)
]


def gpt2(rate: float = 0.1) -> CausalAdapter:
    """A draft of the GPT-2 type: dropout of embeddings, attention and what layers add."""
    rates = {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate}
    return tiny.adapter("gpt2", seed=1, n_layer=1, **rates)


def checkpointed() -> CausalAdapter:
    draft = gpt2()
    checkpoint_activations(draft.model)
    return draft


MAKERS: dict[str, Callable[[], CausalAdapter]] = {
    "gpt2": gpt2,
    "checkpointed": checkpointed,
    "compiled": gpt2,
}


@cache
def traced(name: str) -> Divergence:
    """A compiled loss without machine code, which takes long to make."""
    return torch.compile(DIVERGENCES[name], dynamic=True, backend="aot_eager")


def trainer_of(name: str, **options: int) -> Trainer:
    return Trainer(
        MAKERS[name](),
        TargetTeacher(tiny.adapter(seed=2, num_hidden_layers=1)),
        Objective(DivergenceConfig(), compiled=name == "compiled"),
        optim=OptimConfig(
            learning_rate=1e-2,
            warmup_steps=0,
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            gradient_accumulation_steps=2,
        ),
        **options,
    )


def run(folder: Path, name: str, *, kill_at: int = 0, **options: int) -> dict[str, torch.Tensor]:
    """The weights at the end of a run in `folder`, which goes on where it was killed."""
    trainer = trainer_of(name, **options)

    def log(step, metrics):
        if step == kill_at:
            raise Killed

    source = Source(shuffled(TEXTS, 1), batch_size=4, device=CPU)
    train(trainer, source, folder, evaluate=None, log=log)
    return {name: weight.detach() for name, weight in trainer.trained()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", MAKERS)
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "compiled", traced)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = run(whole, name)
    with pytest.raises(Killed):
        run(cut, name, kill_at=3)
    assert equal(run(cut, name), expected)


def test_another_seed_is_another_noise(tmp_path: Path) -> None:
    assert not equal(run(tmp_path, "gpt2", seed=0), run(tmp_path / "other", "gpt2", seed=1))


def test_nobody_else_loses_or_gains_noise_by_a_step() -> None:
    trainer = trainer_of("gpt2")
    source = Source(shuffled(TEXTS, 1), batch_size=4, device=CPU)
    before = torch.random.get_rng_state()
    first = trainer.step(source.batch(0)).loss
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    assert trainer_of("gpt2").step(source.batch(0)).loss == first


def test_steps_and_processes_have_seeds_of_their_own() -> None:
    keys = [(s, p, t) for s in (0, 1, 2**40) for p in range(4) for t in range(50)]
    seeds = {training.dropout_seed(seed=seed, process=p, step=step) for seed, p, step in keys}
    assert len({seed % 2**32 for seed in seeds}) == len(keys)  # what a CPU's generator takes
