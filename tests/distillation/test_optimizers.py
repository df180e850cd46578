"""Muon turns a matrix by its momentum with all singular values near one; AdamW does the rest."""

import pytest
import torch
from torch import nn

from draftkit.config import OptimConfig
from draftkit.distillation.optimizers import Muon, adamw
from tests.distillation.bigram import Bigram, batch_of, trainer

OPTIM = OptimConfig(learning_rate=0.01, weight_decay=0.0)
RATE = 0.01


class Pair(nn.Module):
    """A matrix inside the model, and an embedding of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(24, 40)
        self.embed_tokens = nn.Embedding(40, 24)


def gradients(model: Pair) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_the_update_of_a_matrix_is_its_gradient_with_like_singular_values() -> None:
    model = Pair()
    before = model.inside.weight.detach().clone()
    optimizer = Muon(model.named_parameters(), OPTIM, RATE)
    gradients(model)
    optimizer.step()
    assert model.inside.weight.grad is not None
    update = (before - model.inside.weight.detach()) / (RATE * 0.2 * 40**0.5)
    left, _, right = torch.linalg.svd(model.inside.weight.grad, full_matrices=False)
    turned = left.T @ update @ right.T  # diagonal where the singular vectors are the gradient's
    values = turned.diagonal()
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    assert float((turned - values.diag()).abs().max()) < 0.05  # it is computed in bfloat16


def test_embeddings_and_vectors_are_updated_by_adamw() -> None:
    one, other = Pair(), Pair()
    ours = Muon(one.named_parameters(), OPTIM, RATE)
    theirs = adamw(other.named_parameters(), OPTIM, RATE)
    for _ in range(3):
        for model, optimizer in ((one, ours), (other, theirs)):
            gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    assert torch.equal(one.inside.bias, other.inside.bias)
    assert not torch.equal(one.inside.weight, other.inside.weight)
    assert all(weight.grad is None for weight in one.parameters())


def test_the_schedule_of_a_trainer_reaches_both() -> None:
    """Also where the optimizer's groups were replaced, as `accelerate` does."""
    change = {}
    for warmup in (0, 1000):
        draft = Bigram(0)
        draft.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        draft.forward = lambda tokens, keep, packing=None, draft=draft: (
            draft.table[tokens[keep]] + draft.bias
        )
        before = [weight.detach().clone() for weight in draft.parameters()]
        trainer(draft, optimizer=Muon, warmup_steps=warmup).step(batch_of(([1, 2, 3, 4], 1)))
        pairs = zip(draft.parameters(), before, strict=True)
        change[warmup] = [float((weight.detach() - old).abs().max()) for weight, old in pairs]
    assert len(change[0]) == 2
    assert all(change[0])
    assert change[1000] == pytest.approx([value / 1000 for value in change[0]], rel=0.02)
