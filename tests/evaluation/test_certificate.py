"""The certificate of a server: its level and its power by simulation, and the law's mutants.

Answers to 20 prompts stand for 20 times as many to one. Random pairs of tables: `unlike` ones share
nothing, so that much is rejected; `alike` ones agree mostly; `two` have two tokens.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, kstest
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import DRAFT_ID
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from draftkit.evaluation import certificate
from draftkit.evaluation.certificate import LEVEL, Answer, same_greedy, same_law
from tests.decoding.checks import Parts, build
from tests.decoding.measuring import Rows
from tests.decoding.mutants import CautiousProposer
from tests.decoding.test_mutants import BROKEN_NOISE
from tests.tabular import TabularAdapter
from tests.theory import mutants
from tests.theory.laws import START
from tests.theory.test_mutants import REJECTED_BY

GAMMA = 3
TOKENS = GAMMA + 2  # of an answer
PROMPTS, SAMPLES = 20, 512
PAIRS = {  # tokens, seed, spread of logits, how far the draft is from the target
    "unlike": (4, 3, 2.5, math.inf),
    "alike": (4, 3, 2.5, 0.6),
    "two": (2, 5, 3.0, math.inf),
    "eight": (8, 3, 2.5, 1.5),
}
# No law shows them: what happens with probability 0, and a division that is never reached.
INVISIBLE = ("accepts at equality", "residual divides by zero")
PAIR_OF = {
    "bonus from the wrong position": "alike",
    "block: likelihood not capped": "alike",
    "block: residual of the unscaled target": "eight",
    "keyed_by_position": "two",
}


@pytest.fixture(autouse=True)
def fewer_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """For speed: the level stays exact."""
    monkeypatch.setattr(certificate, "PERMUTATIONS", 199)


def tables(size: int, seed: int, spread: float, apart: float) -> tuple[Tensor, Tensor]:
    """Probabilities [V, V, V] of target and draft by the last two tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape, double = (size, size, size), torch.float64
    own, other = (spread * torch.randn(shape, generator=generator, dtype=double) for _ in range(2))
    mixed = other if apart == math.inf else (own + apart * other) / math.hypot(1, apart)
    return own.softmax(-1), mixed.softmax(-1)


def decoded(pair: str, parts: Parts, rule: str, *, gamma: int, seed: int) -> list[list[Answer]]:
    """Answers of a decoder by prompt; `gamma` 0: of the target alone."""
    both = tables(*PAIRS[pair])
    target, draft = (TabularAdapter(torch.cat([t, t[:1]]).log()) for t in both)
    request = Request(
        prompt_ids=START,
        max_new_tokens=TOKENS,
        sampling=SamplingConfig(),
        gamma=gamma,
        proposer_id=DRAFT_ID if gamma else None,
        seed=seed,
    )
    one = build(parts, [request], target=target, draft=draft, verification=rule)
    rows = Rows(one).take(torch.zeros(PROMPTS * SAMPLES, dtype=torch.long))
    rows.state.row = torch.arange(PROMPTS * SAMPLES)
    while not rows.state.done.all():
        rows.play()
    ids = rows.state.tokens[:, len(START) : len(START) + TOKENS].numpy()
    answers = [Answer(row, []) for row in np.array([*"01234567"])[ids].tolist()]
    return [answers[at : at + SAMPLES] for at in range(0, len(answers), SAMPLES)]


@lru_cache
def without(pair: str) -> list[list[Answer]]:
    return decoded(pair, Parts(), "speculative", gamma=0, seed=101)


def verdict(pair: str, parts: Parts, rule: str) -> dict[str, Any]:
    drafted = decoded(pair, parts, rule, gamma=GAMMA, seed=0)
    return same_law(drafted, without(pair), gamma=GAMMA, seed=0)


def broken() -> Iterator[Any]:
    """Every mutant of verification and noise: its pair, parts and rule."""
    shapes = {"ragged": CautiousProposer, "one_hot": partial(DraftModelProposer, tokens="argmax")}
    for name, rule, check in REJECTED_BY:
        if name not in INVISIBLE:
            verifier = mutants.verification_mutant(name).VERIFIERS[rule]
            shape = next((key for key in shapes if key in check.__name__), "")
            parts = {"proposer": shapes[shape]} if shape else {}
            made = Parts(verifier=verifier, **parts)
            yield pytest.param(PAIR_OF.get(name, "unlike"), made, rule, id=f"{name}-{rule}-{shape}")
    for noise, rule in BROKEN_NOISE:
        name = noise.__name__
        yield pytest.param(
            PAIR_OF.get(name, "unlike"), Parts(noise=noise), rule, id=f"{name}-{rule}"
        )


@pytest.mark.parametrize(("pair", "parts", "rule"), [*broken()])
def test_a_broken_decoder_gets_no_certificate(pair: str, parts: Parts, rule: str) -> None:
    """At 10,240 answers a server."""
    assert verdict(pair, parts, rule)["passed"] is False


@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_shipped_decoder_gets_one(pair: str, rule: str) -> None:
    made = verdict(pair, Parts(), rule)
    assert made["passed"] is True
    assert made["answers"] == [PROMPTS * SAMPLES] * 2
    assert made["biases"]["repeats"] < 0.06
    assert made["smallest_bias"] < 0.25


def drawn(
    draw: np.random.Generator, prompts: int, count: int, share: float = 0.0
) -> list[list[Answer]]:
    """Answers of three tokens; a share of them says one chain, which depends on the first token."""
    made = []
    for _ in range(prompts):
        ids = draw.integers(0, 3, (count, 3))
        ids[:, 0] = ids[:, 0] > 0
        ids[draw.random(count) < share, 1:] = 0
        made.append([Answer(row, []) for row in np.array([*"012"])[ids].tolist()])
    return made


def test_its_level_is_exact() -> None:
    """1,000 pairs of samples with one law: p-values are uniform, the level is kept."""
    draw, p_values = np.random.default_rng(0), []
    for seed in range(1000):
        drafted, plain = (drawn(draw, 4, count) for count in (24, 16))
        p_values.append(same_law(drafted, plain, gamma=1, seed=seed)["p_value"])
    for level in (LEVEL, 0.05, 0.5):
        low, high = binom.interval(0.9999, 1000, level)
        assert low <= sum(p <= level for p in p_values) <= high
    assert kstest(p_values, "uniform").pvalue > 1e-3


def test_it_sees_repeats_with_the_power_that_it_states() -> None:
    """300 pairs of samples in which the bias is the stated one: 90 % are seen."""
    draw, seen = np.random.default_rng(1), []
    plain = drawn(draw, 8, 100)
    stated = same_law(drawn(draw, 8, 100), plain, gamma=1, seed=0)["biases"]["repeats"]
    share = stated / (1 - 1 / 9)  # of nine chains, one is said anyway
    for seed in range(300):
        samples = drawn(draw, 8, 100, share), drawn(draw, 8, 100)
        seen.append(same_law(*samples, gamma=1, seed=seed)["p_value"] <= LEVEL)
    assert 0.02 < stated < 0.2
    assert 0.82 < np.mean(seen) < 0.97


def markov(
    draw: np.random.Generator, steps: np.ndarray, count: int, inverse: float = 1.0
) -> tuple[list[list[Answer]], float]:
    """Answers of four tokens, by prompt a Markov chain of `steps` [P, V, V] log-probabilities at
    this inverse temperature; and the total variation of tokens 2 to 4 from those at 1."""
    p, q = (np.exp(s * steps) for s in (1.0, inverse))
    p, q = (one / one.sum(-1, keepdims=True) for one in (p, q))
    first, *others = np.indices([steps.shape[-1]] * 4).reshape(4, -1)
    chains = np.stack([first, *others], 1)
    laws = [np.prod([one[:, a, b] for a, b in pairwise(chains.T)], 0) for one in (p, q)]
    laws = [one / steps.shape[-1] for one in laws]  # [P, V^4]: the first is any
    made = [draw.choice(len(chains), count, p=law / law.sum()) for law in laws[1]]
    words = np.array([*"01234567"])[chains]
    answers = [[Answer(row, []) for row in words[ids].tolist()] for ids in made]
    return answers, float(np.abs(laws[0] - laws[1]).sum(-1).mean() / 2)


@pytest.mark.parametrize("spread", [1.0, pytest.param(2.0, marks=pytest.mark.soak)])
def test_it_sees_another_temperature_with_the_power_that_it_states(spread: float) -> None:
    """The stated one is the headline, since a repeated answer is seen sooner."""
    draw = np.random.default_rng(3)
    steps = spread * draw.normal(size=(6, 6, 6))

    def tested(inverse: float, count: int) -> list[dict[str, Any]]:
        pairs = ((markov(draw, steps, 128, at)[0] for at in (inverse, 1.0)) for _ in range(count))
        return [same_law(*pair, gamma=2, seed=seed) for seed, pair in enumerate(pairs)]

    made = tested(1.0, 8)
    assert all(one["biases"]["repeats"] < one["smallest_bias"] for one in made)
    stated = np.median([one["smallest_bias"] for one in made])
    at = np.linspace(0.2, 1, 81)  # hotter and hotter from the end
    found = [markov(draw, steps, 1, one)[1] for one in at]
    seen = [
        one["p_value"] <= LEVEL
        for one in tested(float(np.interp(-stated, -np.array(found), at)), 80)
    ]
    assert 0.05 < stated < 0.4
    assert 0.8 < np.mean(seen) < 0.99


def test_too_few_answers_see_no_bias_and_certify_nothing() -> None:
    draw = np.random.default_rng(2)
    made = same_law(drawn(draw, 2, 3), drawn(draw, 2, 3), gamma=1, seed=0)
    assert (made["passed"], made["smallest_bias"]) == (None, None)


def scored(tokens: str, rival: str = "z", gap: float = 5.0) -> Answer:
    """An answer whose every token leads another by `gap` nats."""
    return Answer([*tokens], [{token: -0.1, rival: -0.1 - gap} for token in tokens])


@pytest.mark.parametrize(
    ("drafted", "gap", "ties", "passed"),
    [
        ("abc", 5.0, 0, True),
        ("azz", 5.0, 0, False),  # another token, which is no rival
        ("azz", 1e-7, 1, True),  # a near-tie
        ("ab", 1e-7, 0, False),  # it ends too soon: no tie explains that
    ],
)
def test_greedy_answers_part_at_near_ties_alone(
    drafted: str, gap: float, ties: int, passed: bool
) -> None:
    plain = [scored("abc", gap=gap), scored("abd")]
    made = same_greedy(plain, plain, [scored(drafted), scored("abd")])
    assert (made["near_ties"], made["passed"]) == (ties, passed)
    assert made["statistic"] == (drafted != "abc")


def test_many_more_near_ties_than_without_a_drafter_are_a_fault() -> None:
    plain: Sequence[Answer] = [scored("abc", gap=1e-7)] * 12
    made = same_greedy(plain, plain, [scored("azc")] * 12)
    assert (made["near_ties"], made["near_ties_without_drafter"]) == (12, 0)
    assert made["passed"] is False


def test_rounding_is_measured_where_plain_answers_are_equal() -> None:
    again = [Answer(["a"], [{"a": -0.1, "z": -0.13}])]
    made = same_greedy([scored("a", gap=0.02)], again, [scored("z")])
    assert made["rounding_nats"] == pytest.approx(0.01)
    assert made["passed"] is False  # 0.02 nats are more than that
