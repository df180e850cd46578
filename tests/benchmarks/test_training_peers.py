"""TRL's trainer takes part with its own loss, which is ours on the same tokens."""

import copy
import sys

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftkit.config import (
    Config,
    DataConfig,
    DivergenceConfig,
    OptimConfig,
)
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.losses import Objective
from draftkit.distillation.teacher import TargetTeacher
from draftkit.distillation.trainer import Trainer
from pipelines.benchmarks.training_peers import BETAS, trl_steps
from tests import tiny
from tests.trained import train_byte_bpe

pytest.importorskip("trl", minversion="1.16")  # older ones have no such trainer
PROMPTS = tiny.prompts([6, 3, 9, 4], seed=1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_byte_bpe(["a b c"], 300)


def steps_of(target, draft, tokenizer, divergence, between=lambda: None):
    config = Config(
        divergence=DivergenceConfig(name=divergence),
        data=DataConfig(prompt_tokens=9, max_length=16),
        optim=OptimConfig(per_device_train_batch_size=2, learning_rate=1e-3),
    )
    whole = tiny.target_of(target, tokenizer)
    return trl_steps(whole, draft.model, PROMPTS, config, 3, between)


@pytest.mark.parametrize("divergence", BETAS)
def test_the_peers_loss_is_ours_on_the_same_tokens(tokenizer, divergence):
    target, draft = tiny.adapter(seed=1), tiny.adapter(seed=2)
    start = copy.deepcopy(draft)
    called = []
    found = steps_of(target, draft, tokenizer, divergence, lambda: called.append(1))
    assert len(found) == len(called) == 3
    ours = Trainer(
        start,
        TargetTeacher(target),
        Objective(DivergenceConfig(name=divergence)),
        optim=OptimConfig(learning_rate=1e-3),
    )
    texts = [continued(prompt, completion) for prompt, completion in found[0].texts]
    metrics = ours.step(collate(texts, device=torch.device("cpu")))
    assert metrics.tokens == found[0].tokens > 7
    assert metrics.loss == pytest.approx(found[0].loss, rel=1e-4)
    assert sorted(p for p, _ in found[0].texts + found[1].texts) == sorted(PROMPTS)
    assert all(step.seconds > 0 for step in found)


def test_a_missing_peer_is_named_with_the_way_to_get_it(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ValueError, match=r"^trl is not installed: pip install 'draftkit\[bench\]'"):
        steps_of(tiny.adapter(), tiny.adapter(), tokenizer, "forward_kl")
