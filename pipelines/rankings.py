"""Which run is the best, by what, and of which others that is sure.

Alpha decides where only training differs, since then a pass costs the same; else the speed-up end
to end, where it can be compared. Seeds of one cell are pooled where all cells have the same.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from draftkit.evaluation.ranking import Difference, Entry, against, speedup_gain
from draftkit.theory.forecast import DEVIATION, LEAST_RUNS, TIMES, forecast

from .runs import Run

CONTROL = "next_token"  # plain training, for as many steps on as many tokens
MEASURES = {"alpha": operator.sub, "tau": operator.sub, "speedup": speedup_gain}
_QUESTION = ("target", "data", "sampling", "evaluate.max_new_tokens")
_NO_QUESTION = ("sampling.temperature", "target.path", "data.path")
_CLOCK = ("hardware", "machine", "evaluate.timing_batch_size")
_COSTS = ("draft.", "decode.", "evaluate.draft")  # what changes the cost of a pass
# By which runs learn from more or less text, of the same kind.
_AMOUNT = ("optim.max_steps", "optim.warmup_steps", "optim.eval_steps", "optim.save_steps")
_AMOUNT += ("generate.rollouts", "machine.")
LISTED = 3  # names in a sentence
AT_MOMENTS = (
    "Runs were timed at different moments. Each speed-up is over plain decoding in turns with it: "
    "what slows a machine as a whole cancels, the rest does not."
)


@dataclass(frozen=True)
class Ranking:
    """Runs at one temperature, best first by `measure`, and what has to be said of them."""

    runs: list[Run]
    measure: str
    notes: list[str]


def differing(runs: Sequence[Run], *beginnings: str) -> list[str]:
    """Settings, of these beginnings, that are not the same in all runs, in order of appearance."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    several = (key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1)
    return [key for key in several if key.startswith(beginnings or "")]


def _asks(key: str) -> bool:
    """Whether runs that differ in this setting answer different questions.

    Not so the temperature: runs are compared at one, whichever of them is served. Nor where target
    and text lie: they are told apart by their checksums.
    """
    return key.startswith(_QUESTION) and key not in _NO_QUESTION


def rankings(runs: Sequence[Run]) -> list[Ranking]:
    """One for each temperature and question that runs were judged at, that of most runs first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if "alpha" in run.entries:
            question = sorted((key, repr(one)) for key, one in run.settings.items() if _asks(key))
            groups.setdefault(f"{run.temperature} {question}", []).append(run)
    made: list[Ranking] = []
    for some in sorted(groups.values(), key=len, reverse=True):
        notes = [] if made else [AT_MOMENTS]
        if made and (keys := [key for key in differing([made[0].runs[0], some[0]]) if _asks(key)]):
            notes.append(f"Not compared with those above, since {_listed(keys)} differ.")
        made.append(ranking(some, notes))
    return made


def ranking(runs: Sequence[Run], notes: list[str]) -> Ranking:
    """Runs that answer one question, or seeds of them pooled, best first."""
    made = pooled(runs)
    if seeds := len(made[0].entries["alpha"].by_seed):
        notes.append(
            f"Means of {seeds} seeds, the lowest and the highest. Errors are those between seeds, "
            f"taken as the same in all cells. Left out: {len(runs) - seeds * len(made)} runs."
        )
    elif len({run.weights or run.name for run in runs}) > 1:
        notes.append(
            f"Errors between runs that were trained apart hold a deviation of {DEVIATION} in alpha "
            "for the seed of each."
        )
    measure, reason = _measure(made)
    made = _with_gaps(sorted(made, key=lambda run: -run.entries[measure].mean), notes)
    return Ranking(made, measure, [reason, *notes, *forecasts(made)])


def forecasts(runs: Sequence[Run]) -> list[str]:
    """What more text would give, where runs differ in how much of it they learned from."""
    tokens = [run.curve[-1][0] if run.curve else 0 for run in runs]
    others = [key for key in differing(runs) if not key.startswith(_AMOUNT)]
    if others or min(tokens) == 0 or len(set(tokens)) < LEAST_RUNS:
        return []
    alphas, texts = [run.entries["alpha"].mean for run in runs], []
    for times in TIMES:
        ahead = forecast(tokens, alphas, times)
        low, high = ahead["interval"]
        texts.append(f"{ahead['mean']:.3f} [{low:.3f}, {high:.3f}] at {times} times")
    most = f"the most ({max(tokens):,.0f})"
    return [f"Forecast of alpha by tokens of training: {', '.join(texts)} {most}; 80 % intervals."]


def pooled(runs: Sequence[Run]) -> list[Run]:
    """The runs; those of a cell, which differ by their seed alone, as one, if all share two seeds.

    That is the first of them, with means, the lowest and the highest of the shared seeds. Else each
    by itself: a cell of other seeds cannot be told from a better one.
    """
    cells: dict[str, dict[str, Run]] = {}
    for run in runs:
        own = {k: repr(v) for k, v in run.settings.items() if not k.startswith("machine.")}
        seed = own.pop("seed", "")
        cells.setdefault(repr(sorted(own.items())), {}).setdefault(seed, run)
    seeds = sorted(set.intersection(*(set(cell) for cell in cells.values())))
    if len(seeds) < 2 or len(cells) < 2:
        return [*runs]
    made = []
    for cell in cells.values():
        some, entries = [cell[seed] for seed in seeds], {}
        for name in MEASURES:
            values = tuple(run.entries[name].mean for run in some if name in run.entries)
            if len(values) == len(seeds):
                entries[name] = Entry(fmean(values), min(values), max(values), by_seed=values)
        label = f"{some[0].label} ({len(seeds)} seeds)"
        made.append(replace(some[0], label=label, entries=entries))
    return made


def _measure(runs: Sequence[Run]) -> tuple[str, str]:
    """What decides, and why."""
    if not (costs := differing(runs, *_COSTS)):
        return "alpha", "Ranked by alpha: a pass costs the same."
    why = f"since {_listed(costs)} may change the cost of a pass"
    timed = all(math.isfinite(run.entries.get("speedup", Entry(0)).high) for run in runs)
    if timed and not differing(runs, *_CLOCK):
        return "speedup", f"Ranked by speed-up, {why}."
    return "alpha", f"Ranked by alpha, as speed-ups cannot be compared. Beware, {why}."


def _with_gaps(runs: list[Run], notes: list[str]) -> list[Run]:
    """The runs with their gaps to the first and, in alpha, to the best of plain training.

    Notes tell of what cannot be compared.
    """
    made: dict[str, list[Difference | None]] = {}
    refused = {"speedup": differing(runs, *_CLOCK)}
    if len({run.gamma for run in runs}) > 1:
        refused["tau"] = ["numbers of proposals"]
    for name, compare in MEASURES.items():
        entries = [run.entries[name] for run in runs if name in run.entries]
        if keys := refused.get(name):
            notes.append(f"No differences of {name}, since {_listed(keys)} differ.")
        elif len(entries) == len(runs):
            made[name] = against(entries, 0, compare)
            if any(gap and not gap.paired for gap in made[name]):
                notes.append(f"Not all {name} are paired; the others are taken as independent.")
    alphas = [run.entries["alpha"] for run in runs]
    plain = [n for n, run in enumerate(runs) if run.settings.get("divergence.name") == CONTROL]
    if plain:
        made[CONTROL] = against(alphas, max(plain, key=lambda number: alphas[number].mean))
    return [
        replace(run, gaps={name: gap for name, gaps in made.items() if (gap := gaps[number])})
        for number, run in enumerate(runs)
    ]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + f" and {more} more" * (more > 0)


def recommendation(made: Sequence[Ranking]) -> tuple[str, str, str]:
    """A verdict in few words, its tone (`good`, `bad` or `open`) and one sentence."""
    if not made or len(made[0].runs) < 2:
        return "Nothing to compare", "open", "No two runs answer the same question."
    (best, *others), measure = made[0].runs, made[0].measure
    rivals = [run.label for run in others if not run.gaps[measure].differs]
    number = f"{best.entries[measure].mean:.3f} at temperature {best.temperature}"
    sure = f"{len(others) - len(rivals)} of {len(others)} other{'s' * (len(others) > 1)}"
    sentence = f"Its {measure} of {number} is surely above {sure}"
    if rivals:
        sentence += f"; {_listed(rivals)} may be as good"
    if all(run.verdict == "do_not_deploy" for run in made[0].runs):
        return "Deploy none", "bad", f"Even the best, {best.label}, gains no time. {sentence}."
    if best.verdict == "deploy":
        return f"Take {best.label}", "good", f"{sentence}."
    verdict = best.verdict.replace("_", " ")
    return f"Take {best.label}", "open", f"{sentence}. Its own verdict: {verdict}."
