"""A sum made chunk by chunk is the plain sum, with its gradients, and holds little memory."""

import pytest
import torch
from torch import nn

from draftkit.config import DIVERGENCE_NAMES, DivergenceConfig, SamplingConfig
from draftkit.distillation import chunked
from draftkit.distillation.chunked import chunked_sum, chunks
from draftkit.distillation.losses import FullScores, Objective
from draftkit.models.adapter import Head

TOKENS, WIDTH, VOCAB = 7, 5, 11
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 3 * 4 * VOCAB)  # three tokens


def parts(*, bias=True, dtype=torch.float64):
    def leaf(*shape):
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    head = Head(leaf(VOCAB, WIDTH), leaf(VOCAB) if bias else None)
    target = Head(torch.randn(VOCAB, 4, dtype=dtype), None)
    return leaf(TOKENS, WIDTH), head, FullScores(torch.randn(TOKENS, 4, dtype=dtype), target)


def brier(*, target_logits, draft_logits, **rest):
    """A loss that the theory does not know."""
    return (target_logits.softmax(-1) - draft_logits.softmax(-1)).square().sum(-1)


def loss_of(scores, name="forward_kl"):
    weights = torch.linspace(0, 1, TOKENS, dtype=torch.float64)
    ids = torch.arange(TOKENS)
    own = brier if name == "own" else None
    config = DivergenceConfig() if own else DivergenceConfig(name=name)
    objective = Objective(config, SamplingConfig(top_k=6), 0.8, own=own)

    def weighted(logits, rows):
        losses = objective.losses(
            scores=scores, draft_logits=logits, token_ids=ids, rows=rows, step=0
        )
        return (weights[rows] * losses).sum()

    return weighted


def test_chunks_cover_every_token_once(monkeypatch):
    for count in range(1, 12):
        found = [i for rows in chunks(count, VOCAB, CPU) for i in range(rows.start, rows.stop)]
        assert found == list(range(count))
    assert [rows.stop - rows.start for rows in chunks(7, VOCAB, CPU)] == [3, 3, 1]
    assert [rows.stop for rows in chunks(2, 10 * VOCAB, CPU)] == [1, 2]  # one token at least
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", 2)
    assert [rows.stop for rows in chunks(5, VOCAB, CPU)] == [2, 4, 5]


def test_chunks_on_cuda_are_of_bytes_alone():
    sizes = [rows.stop - rows.start for rows in chunks(2048, 152_064, CUDA)]
    assert sizes == [330] * 6 + [68]  # 192 MiB of logits
    assert [rows.stop for rows in chunks(2048, VOCAB, CUDA)] == [2048]


@pytest.mark.parametrize("name", [*DIVERGENCE_NAMES, "own"])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_those_of_the_plain_sum(name, bias):
    states, head, scores = parts(bias=bias)
    leaves = [t for t in (states, head.weight, head.bias) if t is not None]
    plain = loss_of(scores, name)(head(states), slice(None))
    expected = torch.autograd.grad(plain, leaves)
    value = chunked_sum(loss_of(scores, name), states=states, head=head)
    torch.testing.assert_close(value, plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(3 * value, leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, 3 * other, rtol=1e-12, atol=1e-12)


def test_states_without_a_head_are_logits():
    states, head, scores = parts()
    logits = head(states).detach().requires_grad_()
    value = chunked_sum(loss_of(scores), states=logits, head=None)
    (found,) = torch.autograd.grad(value, logits)
    (expected,) = torch.autograd.grad(loss_of(scores)(logits, slice(None)), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["states", "head"])
def test_what_is_frozen_gets_no_gradient(frozen):
    states, head, scores = parts()
    states.requires_grad_(frozen != "states")
    head.weight.requires_grad_(frozen != "head")
    head.bias.requires_grad_(frozen != "head")
    chunked_sum(loss_of(scores), states=states, head=head).backward()
    assert (states.grad is None) == (frozen == "states")
    assert (head.weight.grad is None) == (head.bias.grad is None) == (frozen == "head")


def test_a_tied_head_gets_the_gradients_of_both_its_uses():
    embedding = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
    ids = torch.arange(TOKENS)
    _, _, scores = parts()

    def gradient(total):
        embedding.zero_grad()
        total(embedding(ids).tanh(), Head(embedding.weight, None)).backward()
        return embedding.weight.grad.clone()

    found = gradient(lambda states, head: chunked_sum(loss_of(scores), states=states, head=head))
    expected = gradient(lambda states, head: loss_of(scores)(head(states), slice(None)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_products_are_taken_in_the_precision_asked_for():
    states, head, scores = parts(dtype=torch.float32)
    seen = []

    def watch(logits, rows):
        seen.append(logits.dtype)
        return loss_of(scores)(logits, rows)

    chunked_sum(watch, states=states, head=head, dtype=torch.bfloat16).backward()
    assert set(seen) == {torch.bfloat16}
    assert states.grad.dtype == head.weight.grad.dtype == torch.float32
    low = states.grad.clone()
    states.grad = None
    chunked_sum(loss_of(scores), states=states, head=head).backward()
    torch.testing.assert_close(low, states.grad, rtol=0.1, atol=0.05)
