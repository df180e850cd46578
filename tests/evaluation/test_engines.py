"""Tokens a pass that are computed from scored texts equal those that decoding shows."""

from dataclasses import replace
from functools import cache
from typing import Any

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
    drafted_as,
    engine_rows,
)
from draftkit.models.adapter import Adapter
from tests.records import records_of
from tests.tabular import random_adapter, relative

VOCAB, EOS, TEXTS, TOKENS = 8, 7, 400, 30
TARGET = random_adapter(VOCAB, 1)
DRAFT = relative(TARGET, 2)
VLLM, SGLANG = (next(one for one in SETTINGS if one.engine == name) for name in ("vLLM", "SGLang"))


@cache
def made(
    tokens: str, gamma: int, verification: str = "speculative", **served: Any
) -> tuple[list[Completion], PromptTotals]:
    """Texts that the pair has decoded, and their scores."""
    sampling = SamplingConfig(**served)
    prompts = [[row % VOCAB] for row in range(TEXTS)]
    texts = decode(
        TARGET,
        [*make_requests(prompts, max_new_tokens=TOKENS, sampling=sampling, gamma=gamma)],
        eos_token_ids=[EOS],
        batch_size=100,
        proposer=DraftModelProposer(DRAFT, tokens=tokens),
        verification=verification,
    )
    drafts: dict[str, Adapter] = {"draft": DRAFT}
    options: dict[str, Any] = {"sampling": sampling, "batch_size": 50, "eos_token_ids": [EOS]}
    return texts, score_drafts(TARGET, drafts, records_of(texts, sampling), **options)["draft"]


def z_of(texts: list[Completion], totals: PromptTotals, mode: str, gamma: int) -> float:
    """How far the rounds of decoding are from those that the same texts predict."""
    counted = torch.tensor([one.rounds for one in texts], dtype=torch.float64)
    difference = counted - totals.tokens_a_pass(mode, gamma).counts
    return float(difference.mean() / difference.std() * len(texts) ** 0.5)


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "verification", "mode", "other"),
    [
        ("sampled", "speculative", SAMPLED, ARGMAX),
        ("argmax", "speculative", ARGMAX, SAMPLED),
        ("sampled", "match", MATCHED, SAMPLED),
    ],
)
def test_decoding_takes_the_rounds_that_its_texts_predict(
    tokens: str, verification: str, mode: str, other: str, gamma: int
) -> None:
    """And reports the acceptance of the rule that verifies."""
    texts, totals = made(tokens, gamma, verification, temperature=0.8)
    if tokens == "argmax":  # then a text leaves nothing to chance
        rounds = totals.tokens_a_pass(ARGMAX, gamma).counts
        assert rounds.tolist() == pytest.approx([one.rounds for one in texts])
    else:
        assert abs(z_of(texts, totals, mode, gamma)) < 3.5
    assert abs(z_of(texts, totals, other, gamma)) > 8  # the test would see the wrong mode
    accepted = [sum(step.accepted for step in one.steps) for one in texts]  # ends of text too
    totals_of_chances = [one.acceptance_total for one in texts]
    off = torch.tensor(accepted) - torch.tensor(totals_of_chances)
    assert abs(float(off.mean() / off.std() * len(texts) ** 0.5)) < 3.5


def test_a_draft_that_the_engine_does_not_cut_has_a_mode_of_its_own() -> None:
    texts, totals = made("sampled", 2, top_k=3)
    text = [*texts[0].prompt_ids, *texts[0].output_ids]
    target, draft = (model.logits(torch.tensor([text[:-1]]))[0] for model in (TARGET, DRAFT))
    kept = target >= target.topk(3).values[:, -1:]
    p, q = target.masked_fill(~kept, -torch.inf).softmax(-1), draft.softmax(-1)
    assert float(totals.totals[UNCUT][0]) == pytest.approx(float(torch.minimum(p, q).sum()))
    rows = engine_rows(totals, gamma=2)
    modes = {(row["engine"], row["setting"]): row["mode"] for row in rows}
    assert modes["vLLM", "probabilistic"] == UNCUT
    assert UNCUT not in made("sampled", 2, temperature=0.8)[1].totals


def test_a_parallel_draft_has_a_law_for_each_place_in_one_pass_and_a_head_everywhere() -> None:
    shares = [torch.tensor([[0.5, 0.0], [0.5, 0.25]])]
    totals = PromptTotals({ARGMAX: torch.ones(1)}, torch.full((1,), 2.0), {ARGMAX: shares})
    for in_one_pass, places in ((False, 2), (True, 1)):
        drafted, _ = drafted_as(SGLANG, replace(totals, in_one_pass=in_one_pass))
        assert drafted.shares[ARGMAX][0].view(2, -1).shape[1] == places
    (kept,) = drafted_as(VLLM, replace(totals, in_one_pass=True))[0].shares[ARGMAX]
    assert kept is shares[0]


def test_every_setting_is_a_row_at_its_own_gamma() -> None:
    _, totals = made("sampled", 2, temperature=0.8)
    rows = engine_rows(totals, gamma=2)
    assert len(rows) == 1 + len(SETTINGS)
    by_name = {(row["engine"], row["setting"]): row for row in rows}
    assert by_name["SGLang", "argmax"]["gamma"] == 3
    assert by_name["vLLM", "argmax"]["gamma"] == 2
    assert not any("at_best_gamma" in row for row in rows)


def test_a_row_says_the_tokens_a_pass_at_the_best_gamma_of_its_own_mode() -> None:
    """Of one proposal at least, since so an engine is launched that had better not speculate."""
    _, totals = made("sampled", 2, temperature=0.8)
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
