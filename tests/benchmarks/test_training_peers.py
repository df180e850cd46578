"""TRL's trainer takes part with its own loss, which is ours on the same tokens."""

import copy

import pytest
import torch

from draftkit.config import Config, DivergenceConfig, OptimConfig
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.losses import Objective, TargetTeacher
from draftkit.distillation.trainer import Trainer
from tests import tiny
from tests.trained import train_byte_bpe

pytest.importorskip("trl", minversion="1.16")  # older ones have no such trainer
from pipelines.benchmarks import training_peers

PROMPTS = tiny.prompts([6, 3, 9, 4], seed=1)


@pytest.mark.parametrize("divergence", training_peers.BETAS)
def test_the_peers_loss_is_ours_on_the_same_tokens(divergence, monkeypatch):
    target, draft = tiny.adapter(seed=1), tiny.adapter(seed=2)
    start, seen, losses, called = copy.deepcopy(draft), [], [], []

    class Watched(training_peers.Peer):
        def _generate_single_turn(self, prompt_ids, *others, **options):
            made = super()._generate_single_turn(prompt_ids, *others, **options)
            seen.append(list(zip(prompt_ids, made, strict=True)))
            return made

        def _compute_loss(self, *args, **options):
            loss = super()._compute_loss(*args, **options)
            losses.append(float(loss[0].detach()))
            return loss

    monkeypatch.setattr(training_peers, "Peer", Watched)
    optim = OptimConfig(per_device_train_batch_size=2, learning_rate=1e-3)
    config = Config(divergence=DivergenceConfig(name=divergence), optim=optim)
    whole = tiny.target_of(target, train_byte_bpe(["a b c"], 300))
    rates = training_peers.trl_rates(
        *(whole, draft.model, PROMPTS, config),
        steps=3,
        new_tokens=7,
        between=lambda: called.append(1),
    )
    assert len(rates) == len(called) == 3
    assert all(rate > 0 for rate in rates)
    ours = Trainer(
        start,
        TargetTeacher(target),
        Objective(DivergenceConfig(name=divergence)),
        optim=OptimConfig(learning_rate=1e-3),
    )
    texts = [continued(prompt, completion) for prompt, completion in seen[0]]
    metrics = ours.step(collate(texts, device=torch.device("cpu")))
    assert metrics.tokens == sum(len(completion) for _, completion in seen[0]) > 7
    assert metrics.loss == pytest.approx(losses[0], rel=1e-4)
    assert sorted(prompt for prompt, _ in seen[0] + seen[1]) == sorted(PROMPTS)
