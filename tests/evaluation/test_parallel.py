"""Acceptance of a parallel draft by position, and the tokens a pass that follow from it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import ParallelProposer
from draftkit.distillation.scores import stored_scores
from draftkit.evaluation import laws
from draftkit.evaluation.alpha import PromptTotals, score_drafts, score_stored
from draftkit.evaluation.intervals import estimate
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.heads import MEDUSA
from draftkit.models.parallel import Parallel, declare
from draftkit.theory.acceptance import Rate, chain_acceptance, mean_by_position, rounds_of_texts
from draftkit.theory.warping import SamplingParams, warp
from tests import tiny
from tests.decoding.driving import head
from tests.records import records_of

MASK, BLOCKS = 250, 4
SAMPLINGS = {
    "plain": SamplingConfig(),
    "cut": SamplingConfig(temperature=0.8, top_k=20, top_p=0.9),
    "penalty": SamplingConfig(repetition_penalty=1.3),
    "greedy": SamplingConfig(temperature=0.0),
}


def pair() -> tuple[CausalAdapter, CausalAdapter]:
    target = tiny.model("llama", seed=4)
    draft = tiny.related(target, noise=0.2)
    declare(draft.config, Parallel(MASK, BLOCKS))
    size = tiny.VOCAB_SIZE
    return CausalAdapter(target, vocab_size=size), CausalAdapter(draft, vocab_size=size)


def contexts_of(
    target: CausalAdapter, sampling: SamplingConfig, count: int, tokens: int = 20, seed: int = 1
) -> list[Record]:
    prompts = tiny.prompts([4 + row % 5 for row in range(count)], seed=seed)
    requests = [*make_requests(prompts, max_new_tokens=tokens, sampling=sampling, seed=seed)]
    answers = decode(target, requests, eos_token_ids=(), batch_size=count)
    return records_of(answers, sampling, seed=seed)


def scored(
    target: Adapter, draft: Adapter, texts: list[Record], sampling: SamplingConfig, **options: Any
) -> PromptTotals:
    how: dict[str, Any] = {"sampling": sampling, "batch_size": 100, **options}
    return score_drafts(target, {"draft": draft}, texts, **how)["draft"]


def rounds_by_hand(share: Tensor, gamma: int, begin: int = 0) -> float:
    """Expected rounds from token `begin` on, over all outcomes of the first of them."""
    count = len(share)
    if begin >= count:
        return 0.0
    total, alive = 1.0, 1.0
    for place in range(gamma):
        if begin + place >= count:
            return total
        passed = float(share[begin + place, place])
        total += alive * (1 - passed) * rounds_by_hand(share, gamma, begin + place + 1)
        alive *= passed
    return total + alive * rounds_by_hand(share, gamma, begin + gamma + 1)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_rounds_of_texts_by_place_are_those_of_all_outcomes(gamma: int) -> None:
    generator = torch.Generator().manual_seed(gamma)
    shares = [torch.rand(n, 4, generator=generator, dtype=torch.float64) for n in (9, 3, 1)]
    never = torch.tensor([False] * 3)
    found = rounds_of_texts(shares, gamma, cut=never).counts
    expected = [rounds_by_hand(share, gamma) for share in shares]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", SAMPLINGS)
def test_shares_are_those_of_each_chain_read_by_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laws, "CHAINS_AT_ONCE", 7)
    (target, draft), sampling = pair(), SAMPLINGS[name]
    (record,) = contexts_of(target, sampling, 1)
    found = scored(target, draft, [record], sampling, blocks=3).shares["alpha"][0]
    ids, given = [*record.prompt_ids, *record.output_ids], len(record.prompt_ids)
    params = SamplingParams.uniform(1, **vars(sampling))

    def law(model: CausalAdapter, text: list[int], masks: int) -> Tensor:
        fed = torch.tensor([[*text, *[MASK] * masks]])
        keep = torch.zeros_like(fed, dtype=torch.bool)
        keep[:, -1] = True
        seen = torch.zeros(1, 1, tiny.VOCAB_SIZE, dtype=torch.bool)
        seen[..., text] = True
        return warp(model.score(fed, keep)[None], params, seen)[0, 0]

    for token in range(len(record.output_ids)):
        came = ids[given + token]
        p = law(target, ids[: given + token], 0)[came]
        for place in range(3):
            expected = 0.0
            if place <= token:
                q = law(draft, ids[: given + token - place], place)[came]
                expected = min(1.0, float(q / p))
            assert float(found[token, place]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["plain", "greedy"])
def test_tokens_a_pass_are_those_of_the_decoder(name: str) -> None:
    (target, draft), sampling = pair(), SAMPLINGS[name]
    totals = scored(target, draft, contexts_of(target, sampling, 300), sampling)
    predicted = estimate(totals.tokens_a_pass("alpha", BLOCKS))
    plainly = totals.one_by_one.tokens_a_pass("alpha", BLOCKS).mean
    prompts = tiny.prompts([4 + row % 5 for row in range(300)], seed=1)
    requests = make_requests(prompts, max_new_tokens=20, sampling=sampling, gamma=BLOCKS, seed=77)
    answers = decode(
        target, [*requests], eos_token_ids=(), batch_size=300, proposer=ParallelProposer(draft)
    )
    decoded = estimate(Rate.of((one.accepted + one.rounds, one.rounds) for one in answers))
    error = (predicted.high - predicted.low) / 4 + (decoded.high - decoded.low) / 4
    assert abs(predicted.mean - decoded.mean) < 3 * error
    assert plainly - decoded.mean > 3 * error  # token by token the same draft would do better


def test_acceptance_by_position_is_of_all_texts_and_of_the_chain() -> None:
    share = torch.tensor([[0.5, 0.0], [1.0, 0.25], [0.25, 0.75]], dtype=torch.float64)
    assert mean_by_position([share], 2).tolist() == pytest.approx([1.75 / 3, 0.5])
    # Rounds that begin at token 0 or 1 reach the second place with 0.5 and 1; the third has none.
    given = [1.75 / 3, (0.5 * 0.25 + 1.0 * 0.75) / 1.5]
    assert chain_acceptance([share], 2) == pytest.approx(given)


def test_stored_scores_that_hold_all_give_the_same_tokens_a_pass_on_average() -> None:
    target, draft = pair()
    sampling = SAMPLINGS["plain"]
    records = contexts_of(target, sampling, 100)
    stored = stored_scores(target, records, k=tiny.VOCAB_SIZE - 1, loss_temperature=1.0)
    found, _ = score_stored(draft, stored, sampling=sampling, batch_size=50)
    whole = scored(target, draft, records, sampling)
    lengths = [estimate(one.tokens_a_pass("alpha", BLOCKS)) for one in (found, whole)]
    assert lengths[0].mean == pytest.approx(lengths[1].mean, abs=lengths[1].high - lengths[1].low)
    assert found.alpha.mean == pytest.approx(whole.alpha.mean, abs=1e-4)


def test_what_medusa_has_no_head_for_counts_as_refused() -> None:
    """As its proposer, which proposes as many tokens as it has heads."""
    (target, draft), sampling = head(MEDUSA), SAMPLINGS["plain"]
    totals = scored(target, draft, contexts_of(target, sampling, 2), sampling, blocks=5)
    three, five = (totals.tokens_a_pass("alpha", gamma).mean for gamma in (3, 5))
    assert three == pytest.approx(five)
    assert three > 1
