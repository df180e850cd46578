"""The loss is the theory's divergence between the distributions that are served."""

import pytest
import torch

from draftkit.config import DIVERGENCE_NAMES, DivergenceConfig, SamplingConfig
from draftkit.distillation.losses import token_losses
from draftkit.theory.divergences import DIVERGENCES
from draftkit.theory.warping import SamplingParams, warp


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(3)
    shape = (5, 11)
    return {
        "target_logits": torch.randn(shape, generator=generator, dtype=torch.float64) * 2,
        "draft_logits": torch.randn(shape, generator=generator, dtype=torch.float64) * 2,
        "token_ids": torch.tensor([0, 3, 7, 10, 2]),
    }


def losses(logits, name, sampling=None, temperature=1.0):
    return token_losses(
        **logits,
        divergence=DivergenceConfig(name=name),
        sampling=sampling or SamplingConfig(),
        temperature=temperature,
    )


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_the_loss_at_temperature_one_is_the_divergence_of_the_raw_logits(logits, name):
    expected = DIVERGENCES[name](**logits, settings=DivergenceConfig(name=name))
    torch.testing.assert_close(losses(logits, name), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_temperature_divides_both_logits_and_brings_no_factor(logits, name):
    scaled = {**logits, **{k: v / 2 for k, v in logits.items() if k.endswith("logits")}}
    torch.testing.assert_close(losses(logits, name, temperature=2.0), losses(scaled, name))


def test_the_served_cut_reaches_the_target_and_leaves_the_draft_whole(logits):
    sampling = SamplingConfig(top_k=3)
    params = SamplingParams.uniform(1, top_k=3)
    target = warp(logits["target_logits"][None], params)[0]
    log_draft = logits["draft_logits"].log_softmax(-1)
    expected = torch.where(target > 0, target * (target.log() - log_draft), 0.0).sum(-1)
    torch.testing.assert_close(losses(logits, "forward_kl", sampling), expected)


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("sampling", [SamplingConfig(top_k=2), SamplingConfig(top_p=0.5)])
def test_loss_and_gradient_stay_finite_under_every_served_cut(logits, name, sampling):
    logits["draft_logits"].requires_grad_(True)
    values = losses(logits, name, sampling)
    values.sum().backward()
    assert values.isfinite().all()
    assert logits["draft_logits"].grad.isfinite().all()
    assert values.max() < 50  # no token is priced by the floor of an empty support


def test_next_token_needs_no_target(logits):
    value = losses({**logits, "target_logits": None}, "next_token")
    expected = -logits["draft_logits"].log_softmax(-1).gather(1, logits["token_ids"][:, None])[:, 0]
    torch.testing.assert_close(value, expected)
