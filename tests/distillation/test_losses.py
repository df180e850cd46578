"""The loss is the theory's divergence between the distributions that are served."""

import pytest
import torch

from draftkit.config import DIVERGENCE_NAMES, DivergenceConfig, SamplingConfig
from draftkit.distillation.batch import TokenSequence, collate
from draftkit.distillation.losses import FullScores, Objective, Outcomes, token_weights
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


def losses(logits, name, sampling=None, temperature=1.0, step=0, own=None, **options):
    target_logits = logits["target_logits"]
    objective = Objective(
        DivergenceConfig(name=name, **options), sampling or SamplingConfig(), temperature, own=own
    )
    return objective.losses(
        scores=None if target_logits is None else FullScores(target_logits, None),
        draft_logits=logits["draft_logits"],
        token_ids=logits["token_ids"],
        rows=slice(None),
        step=step,
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


@pytest.mark.parametrize("name", ["forward_kl", "jsd", "tvd", "next_token"])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=3, top_p=0.8)])
def test_a_function_of_ones_own_gets_what_the_divergences_get(logits, name, sampling):
    """In place of whatever the settings name, but for the warm-up."""

    def mine(*, target_logits, draft_logits, token_ids, settings):
        return DIVERGENCES[name](
            target_logits=target_logits,
            draft_logits=draft_logits,
            token_ids=token_ids,
            settings=settings,
        )

    options = {"temperature": 0.7, "beta": 0.3}
    expected = losses(logits, name, sampling, **options)
    assert losses(logits, "reverse_kl", sampling, own=mine, **options).equal(expected)
    warming = losses(logits, "tvd", sampling, own=mine, warmup_steps=2, step=1, **options)
    assert warming.equal(losses(logits, "forward_kl", sampling, **options))
    warm = losses(logits, "tvd", sampling, own=mine, warmup_steps=2, step=2, **options)
    assert warm.equal(expected)


@pytest.mark.parametrize("dim", [None, 0])
def test_a_function_that_gives_no_number_a_token_is_refused(logits, dim):
    def total(*, draft_logits, **rest):
        return draft_logits.sum() if dim is None else draft_logits.sum(dim)

    with pytest.raises(
        ValueError, match=r"^the loss must give one number a token, \[5\], and gave"
    ):
        losses(logits, "forward_kl", own=total)


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


def test_a_mixture_is_the_weighted_sum_of_its_terms(logits):
    found = losses(logits, "mixture", mixture={"forward_kl": 0.9, "reverse_kl": 0.1})
    expected = 0.9 * losses(logits, "forward_kl") + 0.1 * losses(logits, "reverse_kl")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_warm_up_takes_the_forward_kl_first(logits):
    for step, name in ((0, "forward_kl"), (4, "forward_kl"), (5, "tvd"), (99, "tvd")):
        found = losses(logits, "tvd", step=step, warmup_steps=5)
        torch.testing.assert_close(found, losses(logits, name), rtol=1e-12, atol=1e-12)


def row(size, **facts):
    """A text of one given token and `size` generated ones."""
    return TokenSequence([1] * (size + 1), [False] + [True] * size, **facts)


def weights_of(rows, **options):
    batch = collate(rows, device=torch.device("cpu"))
    return token_weights(batch, DivergenceConfig(**options)).tolist()


def test_all_tokens_weigh_the_same():
    assert weights_of([row(2), row(1)]) == [1, 1, 1]


def test_refused_tokens_alone_can_be_chosen():
    facts = [[False, True, False], [False, False, True]]
    rows = [row(2, rejected=rejected) for rejected in facts]
    assert weights_of(rows, tokens="rejected") == [1, 0, 0, 1]
    with pytest.raises(ValueError, match=r"^divergence\.tokens=rejected: .* use source=replay"):
        weights_of([row(2)], tokens="rejected")


def test_proposals_late_in_a_block_can_weigh_less():
    rows = [row(3, block_offset=[0, 0, 1, 2]), row(1, block_offset=[0, 0])]
    assert weights_of(rows, position_decay=0.5) == [1, 0.5, 0.25, 1]
    with pytest.raises(ValueError, match=r"^divergence\.position_decay: .* use source=block"):
        weights_of([row(2)], position_decay=0.5)


def test_the_overlap_is_alpha_of_what_the_loss_compares(logits):
    objective = Objective(DivergenceConfig(), SamplingConfig(top_k=3), 0.7)
    found = objective.overlap(
        scores=FullScores(logits["target_logits"], None),
        draft_logits=logits["draft_logits"],
        rows=slice(None),
    )
    p = warp(logits["target_logits"][None], SamplingParams.uniform(1, temperature=0.7, top_k=3))[0]
    q = warp(logits["draft_logits"][None], SamplingParams.uniform(1, temperature=0.7))[0]
    torch.testing.assert_close(found, torch.minimum(p, q).sum(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=2)])
def test_a_draft_of_some_ids_learns_the_target_of_these(logits, name, sampling):
    kept, ids = torch.tensor([0, 2, 3, 7, 10]), torch.tensor([0, 3, 7, 10, 2])
    outcomes = Outcomes.of(kept, 11)
    narrow = logits["draft_logits"][:, kept].requires_grad_()
    found = Objective(DivergenceConfig(name=name), sampling, 1.0, outcomes=outcomes).losses(
        scores=FullScores(logits["target_logits"], None).among(outcomes),
        draft_logits=narrow,
        token_ids=ids,
        rows=slice(None),
        step=0,
    )
    expected = losses(
        {
            "target_logits": logits["target_logits"][:, kept],
            "draft_logits": narrow,
            "token_ids": torch.searchsorted(kept, ids),
        },
        name,
        sampling,
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), narrow)
    assert gradient.isfinite().all()


def test_a_token_that_the_draft_cannot_propose_teaches_nothing_and_breaks_nothing(logits):
    draft = logits["draft_logits"].clone()
    draft[:, 5] = -torch.inf
    draft.requires_grad_()
    found = losses(
        {**logits, "draft_logits": draft, "token_ids": torch.full((5,), 5)}, "next_token"
    )
    (gradient,) = torch.autograd.grad(found.sum(), draft)
    assert found.isfinite().all()
    assert gradient.nan_to_num(nan=9.0).abs().max() == 0
