"""The decoder has the target's law: by enumeration to 1e-10, and by chi-square with real noise.

The decoder is a black box here: `measuring.measure` finds every breakpoint of every uniform by
bisection, whoever proposes. `test_mutants.py` shows what these checks reject, and `test_ngrams` and
`test_composite_rounds` what they reject of other proposers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from draftkit.config import SamplingConfig
from draftkit.decoding.catalogue import PROPOSERS
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.ngrams import CountTable, PromptLookup, count_table
from draftkit.decoding.proposers import DraftModelProposer, ParallelProposer, Proposer
from draftkit.theory import noise
from tests.decoding import mutants
from tests.decoding.checks import (
    Made,
    Parts,
    Setting,
    build,
    check_joint_law,
    check_proposal_law,
    check_sampled,
    check_swapped,
    check_text_alone,
    measured,
)
from tests.decoding.driving import request
from tests.tabular import TabularAdapter, random_adapter, relative, with_masks
from tests.theory import checks as theory_checks

PLAIN = SamplingConfig()
CUT = SamplingConfig(temperature=0.7, top_k=2)
NUCLEUS = SamplingConfig(top_p=0.8)
PENALTY = SamplingConfig(repetition_penalty=1.5)
ALL = SamplingConfig(temperature=0.9, top_k=2, top_p=0.95, repetition_penalty=1.3)
GREEDY = SamplingConfig(temperature=0.0)
EVERY = (PLAIN, CUT, NUCLEUS, PENALTY, ALL, GREEDY)

SETTINGS = {
    "gamma 2, mixed": Setting(gamma=2, tokens=3, samplings=EVERY),
    "gamma 2, penalty to two ends": Setting(gamma=2, samplings=(PENALTY,), eos=(0, 2)),
    "gamma 3, to the end": Setting(gamma=3, samplings=(PLAIN, NUCLEUS), eos=(2,)),
}
WHATEVER_THE_RULE = {  # with one proposal, or greedy, both rules are one
    "plain decoding": Setting(gamma=0, samplings=EVERY, eos=(2,)),
    "gamma 1, mixed": Setting(gamma=1, tokens=3, samplings=EVERY),
    "gamma 2, all greedy": Setting(gamma=2, samplings=(GREEDY,)),
}
rules = pytest.mark.parametrize("rule", ["speculative", "block"])


def check_everything(setting: Setting) -> int:
    """All that enumeration can say; returns how many later rounds were tried."""
    result = measured(Parts(), setting)
    if not result.rows.inputs.group.greedy:  # rounds of every kind are followed by others
        assert set(result.cells.outcome.accepted.tolist()) == {*range(setting.gamma + 1)}
    check_joint_law(result)
    check_proposal_law(result)
    return check_text_alone(result)


def check_law(make: Made, setting: Setting) -> None:
    """What enumeration can say of any proposer."""
    result = measured(Parts(proposer=make), setting)
    check_joint_law(result)
    assert check_text_alone(result) > 0


@rules
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_joint_law_is_the_targets_and_rounds_know_the_text_alone(
    setting: Setting, rule: str
) -> None:
    assert check_everything(replace(setting, verification=rule)) > 0


@pytest.mark.parametrize("setting", WHATEVER_THE_RULE.values(), ids=WHATEVER_THE_RULE)
def test_the_joint_law_is_the_targets_where_rules_do_not_differ(setting: Setting) -> None:
    assert check_everything(setting) > 0


@pytest.mark.soak
@rules
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("eos", [(), (0,), (1, 2)])
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_joint_law_is_the_targets_everywhere(
    gamma: int, eos: tuple[int, ...], seed: int, rule: str
) -> None:
    setting = Setting(gamma=gamma, verification=rule, samplings=EVERY, eos=eos, seed=seed)
    assert check_everything(replace(setting, tokens=4 if gamma == 3 else 5)) > 0


def test_ragged_proposals_keep_the_joint_law() -> None:
    setting = Setting(tokens=3, verification="block", samplings=(CUT, PENALTY, GREEDY))
    check_law(mutants.CautiousProposer, setting)


def test_new_draft_weights_between_rounds_keep_the_law() -> None:
    check_swapped(Parts(), Setting(verification="block", samplings=(ALL,), eos=(2,)))


# Other proposers


def table_of(draft: TabularAdapter, order: int) -> CountTable:
    """Counts of some text, in float64: single precision would be seen."""
    generator = torch.Generator().manual_seed(order)
    size = draft.vocab_size
    texts = torch.randint(size, (4, 20), generator=generator).tolist()
    return CountTable(count_table(texts, vocab_size=size, order=order).double())


def named(name: str) -> Made:
    """What `decode.proposer=name` makes, with tables in float64, and staged in short passes.

    A longer pass has more draws of its own, all of which enumeration must bisect.
    """

    def make(draft: TabularAdapter) -> Proposer:
        generator = torch.Generator().manual_seed(3)
        texts = torch.randint(draft.vocab_size, (4, 20), generator=generator).tolist()
        made = PROPOSERS[name](lambda: draft, lambda: texts, draft)
        if isinstance(made, CountTable):
            made.table = made.table.double()
        if isinstance(made, StagedProposer):
            made.width = 1
        return made

    return make


ALL_PROPOSERS: dict[str, Made] = {
    **{name: named(name) for name in PROPOSERS},
    "hybrid of lookup": lambda draft: HybridProposer(
        PromptLookup(min_ngram=2), DraftModelProposer(draft)
    ),
    "staged on bigram": lambda draft: StagedProposer(
        table_of(draft, 2), DraftModelProposer(draft), width=1
    ),
    "parallel": lambda draft: ParallelProposer(with_masks(draft)),
    "hybrid of parallel": lambda draft: HybridProposer(
        PromptLookup(min_ngram=2), ParallelProposer(with_masks(draft))
    ),
}
proposers = pytest.mark.parametrize("make", ALL_PROPOSERS.values(), ids=ALL_PROPOSERS)
all_rules = pytest.mark.parametrize("rule", ["speculative", "block", "match"])
different = pytest.mark.parametrize("name", ["ngram", "hybrid of lookup", "staged on bigram"])
other_rules = pytest.mark.parametrize("rule", ["block", "match"])


@proposers
def test_the_joint_law_is_the_targets_whoever_proposes(make: Made) -> None:
    check_law(make, Setting(gamma=2, tokens=3, samplings=(PLAIN, ALL)))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("ngram", "block"),
        ("hybrid of lookup", "match"),
        ("parallel", "block"),
    ],
)
def test_the_joint_law_is_the_targets_under_other_rules(name: str, rule: str) -> None:
    setting = Setting(gamma=2, tokens=3, verification=rule, samplings=(PLAIN, ALL))
    check_law(ALL_PROPOSERS[name], setting)


@proposers
def test_the_joint_law_of_greedy_rows_is_the_targets_whoever_proposes(make: Made) -> None:
    greedy = (GREEDY, replace(PENALTY, temperature=0.0))
    check_law(make, Setting(gamma=3, samplings=greedy, eos=(2,)))


@pytest.mark.soak
@proposers
@all_rules
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_joint_law_is_the_targets_everywhere_whoever_proposes(
    make: Made, rule: str, gamma: int
) -> None:
    check_law(make, Setting(gamma=gamma, verification=rule, samplings=EVERY, eos=(2,)))


# Real noise

Tables = Callable[[], tuple[torch.Tensor, torch.Tensor]]
ROWS = 20_000
TABLES = {"adversarial": theory_checks.adversarial_tables, "small": theory_checks.small_tables}
SAMPLED = {"plain": PLAIN, "cut": SamplingConfig(temperature=0.8, top_k=6, top_p=0.9)}


@all_rules
def test_decoded_rows_have_the_targets_law_under_an_adversarial_draft(rule: str) -> None:
    tables = theory_checks.adversarial_tables()
    check_sampled(Parts(), tables, rows=ROWS, verification=rule, sampling=SAMPLED["cut"])


@pytest.mark.soak
@rules
@pytest.mark.parametrize("gamma", [1, 2, 4, 6])
@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
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
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_the_p_values_of_repetitions_are_uniform(tables: Tables, gamma: int, rule: str) -> None:
    options: dict[str, Any] = {"rows": 50_000, "tokens": 5, "gamma": gamma, "level": 1e-5}
    p_values = [
        check_sampled(Parts(), tables(), verification=rule, seed=seed, **options)[3, 4]
        for seed in range(40)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("name", ["hybrid of lookup", "staged on bigram", "parallel"])
def test_decoded_rows_have_the_targets_law_whoever_draws(name: str) -> None:
    tables, parts = theory_checks.adversarial_tables(), Parts(proposer=ALL_PROPOSERS[name])
    check_sampled(parts, tables, rows=ROWS // 2, sampling=SAMPLED["cut"])


@pytest.mark.soak
@proposers
def test_two_hundred_thousand_rows_have_the_targets_law_whoever_proposes(make: Made) -> None:
    tables = theory_checks.adversarial_tables()
    check_sampled(Parts(proposer=make), tables, rows=200_000, tokens=16, gamma=4)


@pytest.mark.soak
@other_rules
@different
def test_two_hundred_thousand_rows_have_the_targets_law_under_other_rules(
    name: str, rule: str
) -> None:
    tables, parts = theory_checks.adversarial_tables(), Parts(proposer=ALL_PROPOSERS[name])
    check_sampled(parts, tables, rows=200_000, verification=rule, tokens=16, gamma=4)


@pytest.mark.parametrize("name", ["sampled", "staged on bigram"])
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
