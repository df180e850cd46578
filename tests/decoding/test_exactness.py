"""The decoder has the target's law: by enumeration to 1e-10, and by chi-square with real noise.

The decoder is a black box here: `measuring.measure` finds every breakpoint of every uniform by
bisection, whoever proposes. `test_mutants.py` shows what these checks reject.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from draftkit.config import SamplingConfig
from draftkit.theory import noise
from tests.decoding.checks import (
    ALL,
    CUT,
    EVERY,
    GREEDY,
    NUCLEUS,
    PENALTY,
    PLAIN,
    Made,
    Parts,
    Setting,
    build,
    check_law,
    check_sampled,
    check_swapped,
)
from tests.decoding.driving import request
from tests.decoding.mutants import (
    ALL_PROPOSERS,
    DRAWN,
    ENDS,
    MIXED,
    SINGLE,
    CautiousProposer,
    parts_of,
)
from tests.tabular import random_adapter, relative
from tests.theory import checks as theory_checks

TO_THE_END = Setting(gamma=3, tokens=4, samplings=(PLAIN, NUCLEUS), eos=(2,))
OF_RULES = {"mixed": MIXED, "ends": ENDS, "to the end": TO_THE_END}
SETTINGS = {
    f"{name}-{rule}": replace(setting, verification=rule)
    for name, setting in OF_RULES.items()
    for rule in ("speculative", "block")
} | {  # with one proposal, or greedy, all rules are one
    "plain decoding": Setting(gamma=0, tokens=4, samplings=EVERY, eos=(2,)),
    "gamma 1": SINGLE,
    "all greedy": Setting(tokens=4, samplings=(GREEDY,)),
}
rules = pytest.mark.parametrize("rule", ["speculative", "block"])


def check_everything(setting: Setting) -> None:
    result = check_law(parts_of(), setting)
    if setting.samplings != (GREEDY,):  # rounds of every kind are followed by others
        assert set(result.cells.outcome.accepted.tolist()) == {*range(setting.gamma + 1)}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_joint_law_is_the_targets_and_rounds_know_the_text_alone(setting: Setting) -> None:
    check_everything(setting)


@pytest.mark.soak
@rules
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("eos", [(), (0,), (1, 2)])
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_joint_law_is_the_targets_everywhere(
    gamma: int, eos: tuple[int, ...], seed: int, rule: str
) -> None:
    setting = Setting(gamma=gamma, verification=rule, samplings=EVERY, eos=eos, seed=seed)
    check_everything(replace(setting, tokens=4 if gamma == 3 else 5))


def test_new_draft_weights_between_rounds_keep_the_law() -> None:
    check_swapped(Parts(), Setting(tokens=4, verification="block", samplings=(ALL,), eos=(2,)))


# Other proposers


proposers = pytest.mark.parametrize("make", ALL_PROPOSERS.values(), ids=ALL_PROPOSERS)
all_rules = pytest.mark.parametrize("rule", ["speculative", "block", "match"])


@proposers
def test_the_joint_law_is_the_targets_whoever_proposes(make: Made) -> None:
    check_law(Parts(proposer=make), DRAWN)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("ngram", "block"), ("hybrid", "match"), ("parallel, of a table", "block")],
)
def test_the_joint_law_is_the_targets_under_other_rules(name: str, rule: str) -> None:
    check_law(Parts(proposer=ALL_PROPOSERS[name]), replace(DRAWN, verification=rule))


@rules
def test_ragged_proposals_keep_the_joint_law(rule: str) -> None:
    setting = Setting(verification=rule, samplings=(PLAIN, CUT, PENALTY, GREEDY))
    check_law(Parts(proposer=CautiousProposer), setting)


@proposers
def test_the_joint_law_of_greedy_rows_is_the_targets_whoever_proposes(make: Made) -> None:
    greedy = (GREEDY, replace(PENALTY, temperature=0.0))
    check_law(Parts(proposer=make), Setting(gamma=3, tokens=4, samplings=greedy, eos=(2,)))


@pytest.mark.soak
@proposers
@all_rules
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_joint_law_is_the_targets_everywhere_whoever_proposes(
    make: Made, rule: str, gamma: int
) -> None:
    setting = Setting(gamma=gamma, tokens=4, verification=rule, samplings=EVERY, eos=(2,))
    check_law(Parts(proposer=make), setting)


# Real noise

Tables = Callable[[], tuple[torch.Tensor, torch.Tensor]]
ROWS = 20_000
TABLES = {"adversarial": theory_checks.adversarial_tables, "small": theory_checks.small_tables}
SAMPLED = {"plain": PLAIN, "cut": SamplingConfig(temperature=0.8, top_k=6, top_p=0.9)}


tables_of = pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)


@all_rules
@pytest.mark.parametrize(("name", "sampling"), [("adversarial", "cut"), ("small", "plain")])
def test_decoded_rows_have_the_targets_law(name: str, sampling: str, rule: str) -> None:
    check_sampled(Parts(), TABLES[name](), rows=ROWS, verification=rule, sampling=SAMPLED[sampling])


@pytest.mark.soak
@rules
@pytest.mark.parametrize("gamma", [1, 2, 4, 6])
@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
@tables_of
def test_two_hundred_thousand_rows_have_the_targets_law(
    tables: Tables, sampling: SamplingConfig, gamma: int, rule: str
) -> None:
    check_sampled(
        Parts(),
        tables(),
        rows=200_000,
        verification=rule,
        sampling=sampling,
        gamma=gamma,
        tokens=8,
        seed=gamma,
    )


@pytest.mark.soak
@all_rules
@pytest.mark.parametrize("gamma", [1, 2, 4, 6])
@tables_of
def test_the_p_values_of_repetitions_are_uniform(tables: Tables, gamma: int, rule: str) -> None:
    options: dict[str, Any] = {"rows": 50_000, "tokens": 5, "gamma": gamma, "level": 1e-5}
    p_values = [
        check_sampled(Parts(), tables(), verification=rule, seed=seed, **options)[3, 4]
        for seed in range(40)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("name", ["hybrid", "staged, of a table", "parallel, of a table"])
def test_decoded_rows_have_the_targets_law_whoever_draws(name: str) -> None:
    tables, parts = theory_checks.adversarial_tables(), Parts(proposer=ALL_PROPOSERS[name])
    check_sampled(parts, tables, rows=ROWS // 2, sampling=SAMPLED["cut"])


@pytest.mark.soak
@proposers
def test_two_hundred_thousand_rows_have_the_targets_law_whoever_proposes(make: Made) -> None:
    tables = theory_checks.adversarial_tables()
    check_sampled(Parts(proposer=make), tables, rows=200_000, tokens=16, gamma=4)


@pytest.mark.parametrize("name", ["sampled", "staged, of a table"])
def test_no_number_is_drawn_twice(name: str) -> None:
    """Every draw of every round has a key of its own, also where its text comes again later."""
    keys: list[tuple[int, ...]] = []

    def listening(**key: Any) -> torch.Tensor:
        assert key.get("first", 0) == 0
        rows = torch.stack([key["seed"], key["row"], key["length"]], dim=1).tolist()
        keys.extend((*row, key["purpose"]) for row in rows)
        return noise.uniform(**key)

    target = random_adapter(8, 1)
    requests = [request([row], new=20, gamma=3, seed=row % 2, row=row) for row in range(4)]
    parts = Parts(noise=listening, proposer=ALL_PROPOSERS[name])
    decoder = build(parts, requests, target=target, draft=relative(target, 2))
    rounds = 0
    while decoder.round():
        rounds += 1
    assert rounds > 5
    assert len(keys) == len(set(keys)) >= 4 * 3 * 5
