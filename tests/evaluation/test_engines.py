"""Tokens a pass that are computed from scored texts equal those that decoding shows."""

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.alpha import UNCUT, PromptTotals, score_drafts
from draftkit.evaluation.engines import (
    ARGMAX,
    LAUNCHED,
    MATCHED,
    SAMPLED,
    SETTINGS,
    best_gamma_of,
    engine_rows,
)
from draftkit.models.adapter import Adapter
from tests.records import records_of
from tests.tabular import random_adapter, relative

VOCAB, EOS, TEXTS, TOKENS = 8, 7, 400, 30
PROPOSED = {"sampled": SAMPLED, "argmax": ARGMAX}
TARGET = random_adapter(VOCAB, 1)
DRAFT = relative(TARGET, 2)


def decoded(
    sampling: SamplingConfig, tokens: str, gamma: int, verification: str = "speculative"
) -> list[Completion]:
    prompts = [[row % VOCAB] for row in range(TEXTS)]
    requests = [*make_requests(prompts, max_new_tokens=TOKENS, sampling=sampling, gamma=gamma)]
    proposer = DraftModelProposer(DRAFT, tokens=tokens)
    return decode(
        TARGET,
        requests,
        eos_token_ids=[EOS],
        batch_size=100,
        proposer=proposer,
        verification=verification,
    )


def scored(texts: list[Completion], sampling: SamplingConfig) -> PromptTotals:
    records = records_of(texts, sampling)
    drafts: dict[str, Adapter] = {"draft": DRAFT}
    return score_drafts(
        TARGET, drafts, records, sampling=sampling, batch_size=50, eos_token_ids=[EOS]
    )["draft"]


def z_of(texts: list[Completion], totals: PromptTotals, mode: str, gamma: int) -> float:
    """How far the rounds of decoding are from those that the same texts predict."""
    counted = torch.tensor([one.rounds for one in texts], dtype=torch.float64)
    difference = counted - totals.tokens_a_pass(mode, gamma).counts
    return float(difference.mean() / difference.std() * len(texts) ** 0.5)


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("tokens", PROPOSED)
def test_decoding_takes_the_rounds_that_its_texts_predict(tokens: str, gamma: int) -> None:
    sampling = SamplingConfig(temperature=0.8)
    texts = decoded(sampling, tokens, gamma)
    totals = scored(texts, sampling)
    if tokens == "argmax":  # then a text leaves nothing to chance
        rounds = totals.tokens_a_pass(ARGMAX, gamma).counts
        assert rounds.tolist() == pytest.approx([one.rounds for one in texts])
    else:
        assert abs(z_of(texts, totals, SAMPLED, gamma)) < 3.5
    other = ARGMAX if tokens == "sampled" else SAMPLED
    assert abs(z_of(texts, totals, other, gamma)) > 8  # the test would see the wrong mode


@pytest.mark.parametrize("verification", ["speculative", "match"])
def test_decoding_reports_the_acceptance_of_the_rule_that_verifies(verification: str) -> None:
    """And its rounds are those of that rule's mode, whose row is draftkit's."""
    sampling = SamplingConfig(temperature=0.8)
    texts = decoded(sampling, "sampled", 2, verification)
    off = torch.tensor([one.accepted - one.acceptance_total for one in texts])
    assert abs(float(off.mean() / off.std() * len(texts) ** 0.5)) < 3.5
    totals = scored(texts, sampling)
    mode = MATCHED if verification == "match" else SAMPLED
    assert abs(z_of(texts, totals, mode, 2)) < 3.5
    other = SAMPLED if verification == "match" else MATCHED
    assert abs(z_of(texts, totals, other, 2)) > 8


def test_a_draft_that_the_engine_does_not_cut_has_a_mode_of_its_own() -> None:
    sampling = SamplingConfig(top_k=3)
    texts = decoded(sampling, "sampled", 2)
    totals = scored(texts, sampling)
    text = [*texts[0].prompt_ids, *texts[0].output_ids]
    target, draft = (model.logits(torch.tensor([text[:-1]]))[0] for model in (TARGET, DRAFT))
    kept = target >= target.topk(3).values[:, -1:]
    p, q = target.masked_fill(~kept, -torch.inf).softmax(-1), draft.softmax(-1)
    assert float(totals.totals[UNCUT][0]) == pytest.approx(float(torch.minimum(p, q).sum()))
    rows = engine_rows(totals, gamma=2)
    modes = {(row["engine"], row["setting"]): row["mode"] for row in rows}
    assert modes["vLLM", "probabilistic"] == UNCUT
    assert UNCUT not in scored(texts, SamplingConfig()).totals


def test_every_setting_is_a_row_at_its_own_gamma() -> None:
    sampling = SamplingConfig(temperature=0.8)
    totals = scored(decoded(sampling, "sampled", 2), sampling)
    rows = engine_rows(totals, gamma=2)
    assert len(rows) == 1 + len(SETTINGS)
    by_name = {(row["engine"], row["setting"]): row for row in rows}
    assert by_name["SGLang", "argmax"]["gamma"] == 3
    assert by_name["vLLM", "argmax"]["gamma"] == 2
    assert not any("at_best_gamma" in row for row in rows)


def test_a_row_says_the_tokens_a_pass_at_the_best_gamma_of_its_own_mode() -> None:
    """Of one proposal at least, since so an engine is launched that had better not speculate."""
    sampling = SamplingConfig(temperature=0.8)
    totals = scored(decoded(sampling, "sampled", 2), sampling)
    best = {SAMPLED: 5, ARGMAX: 2, MATCHED: 0}
    rows = engine_rows(totals, gamma=4, best_gammas=best)
    for row in rows:
        gamma = max(best[row["mode"]], 1)
        length = totals.tokens_a_pass(row["mode"], gamma).mean
        assert row["at_best_gamma"]["gamma"] == gamma
        assert row["at_best_gamma"]["acceptance_length"]["mean"] == pytest.approx(length)
    judged = {"best_gamma": 5, "best_gamma_by_mode": best, "engines": rows}
    gammas = {engine: best_gamma_of(judged, engine) for engine in LAUNCHED}
    assert gammas == {"hf": 5, "vllm": 5, "sglang": 2, "llamacpp": 2, "onnx": 5}
