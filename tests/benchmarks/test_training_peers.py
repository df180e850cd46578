"""TRL's trainer takes part with its own loss, which is ours on the same tokens."""

import copy

import pytest
import torch
from accelerate.state import AcceleratorState

from draftkit.config import Config, DataConfig, DivergenceConfig, OptimConfig, SourceConfig
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.losses import Objective, TargetTeacher
from draftkit.distillation.trainer import Trainer
from tests import tiny
from tests.trained import train_byte_bpe

pytest.importorskip("trl", minversion="1.16")  # older ones have no such trainer
from pipelines.benchmarks import training_peers
from pipelines.benchmarks.training import beside_trl

PROMPTS = tiny.prompts([6, 3, 9, 4], seed=1)


@pytest.mark.parametrize("divergence", training_peers.BETAS)
def test_the_peers_loss_is_ours_on_the_same_tokens(divergence, monkeypatch):
    target, draft = tiny.adapter(seed=1), tiny.adapter(seed=2)
    start, losses = copy.deepcopy(draft), []

    def watched(peer, *args, **options):
        loss = real(peer, *args, **options)
        losses.append(float(loss[0].detach()))
        return loss

    real = training_peers.Peer._compute_loss
    monkeypatch.setattr(training_peers.Peer, "_compute_loss", watched)
    optim = OptimConfig(per_device_train_batch_size=2, learning_rate=1e-3)
    config = Config(divergence=DivergenceConfig(name=divergence), optim=optim)
    whole = tiny.target_of(target, train_byte_bpe(["a b c"], 300))
    way = training_peers.trl_step(whole, draft.model, config, new_tokens=7)
    chunk = way.answer(PROMPTS[:2], 0)
    assert [answer.prompt_ids for answer in chunk.completions] == PROMPTS[:2]
    of_both = zip(draft.model.parameters(), start.model.parameters(), strict=True)
    moved = max(float((new - old).detach().abs().max()) for new, old in of_both)
    assert moved == pytest.approx(1e-3, rel=0.01)  # a first step of Adam
    ours = Trainer(
        start,
        TargetTeacher(target),
        Objective(DivergenceConfig(name=divergence)),
        optim=OptimConfig(learning_rate=1e-3),
    )
    texts = [continued(answer.prompt_ids, answer.output_ids) for answer in chunk.completions]
    metrics = ours.step(collate(texts, device=torch.device("cpu")))
    assert metrics.tokens == chunk.tokens > 7
    assert metrics.loss == pytest.approx(losses[0], rel=1e-4)
    assert chunk.seconds > 0


def test_both_take_turns_in_bfloat16(monkeypatch):
    """accelerate has one state a process, of the precision that was named first."""
    seen = []

    def watched(peer, *args, **options):
        seen.append(peer.accelerator.mixed_precision)
        return real(peer, *args, **options)

    real = training_peers.Peer._compute_loss
    monkeypatch.setattr(training_peers.Peer, "_compute_loss", watched)
    target, draft = tiny.adapter(seed=1), tiny.adapter(seed=2)
    target.model.to(torch.bfloat16)
    whole = tiny.target_of(target, train_byte_bpe(["a b c"], 300))
    config = Config(
        data=DataConfig(max_length=48, prompt_tokens=40),
        divergence=DivergenceConfig(name="reverse_kl"),
        optim=OptimConfig(per_device_train_batch_size=2, learning_rate=1e-3),
        source=SourceConfig(name="draft"),
    )
    try:
        found = beside_trl(whole, draft, PROMPTS, config)
    finally:
        AcceleratorState._reset_state()
    assert found["steps"] == 2
    assert set(seen) == {"bf16"}
