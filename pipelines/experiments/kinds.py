"""`python -m pipelines.experiments.kinds +experiment=kinds`: which kind of drafter, by measurement.

Of each target one drafter of each kind learns from the same answers, for about as many minutes, and
is judged on the same prompts: greedily and at temperature 1, one row and eight rows at a time.
Words behind the command are settings for all of them. The tables of docs/results/kinds.md go to
`<root>/kinds/kinds.md`. What is there already is not made again.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, write_text
from draftkit.config import Config
from draftkit.decoding.ngrams import PromptLookup
from draftkit.evaluation.choice import HYBRID, LOOKUP, guessed_lengths
from draftkit.evaluation.report import proposals_text
from draftkit.models.files import ModelFolder
from draftkit.models.loading import weight_count
from draftkit.templates import interval, render

from ..command import guarded
from ..configuration import compose_config
from ..contexts import read_contexts
from ..plan import CONTEXTS, EVALUATE, TRAIN, at_temperatures
from ..product import SUMMARY, plan
from ..stage import ensure
from ..train import DRAFT

EXPERIMENT = "+experiment=kinds"
TARGETS = {  # the settings of each
    "smollm2_135m": ("draft.head.vocabulary=8192", "evaluate.timing_minutes=8"),
    "embedded": ("data=corpus", "evaluate.max_new_tokens=64"),
}
LEARNING = {  # those of training alone; SmolLM2's texts are those of `+experiment=smollm2_135m`
    "smollm2_135m": (
        *("sampling.temperature=0.2", "sampling.top_p=0.9", "divergence.temperature=1.0"),
        *("generate.rollouts=3072", "generate.batch_size=96", "generate.top_k=64"),
        *("evaluate.prompts=96", "optim.eval_steps=300"),
    ),
    "embedded": (
        *("generate.rollouts=3072", "optim.per_device_train_batch_size=16"),
        "optim.eval_steps=100",
    ),
}
CUT = {  # how two of the kinds begin, and learn
    "smollm2_135m": ("draft=pard", "optim.learning_rate=1e-3"),
    "embedded": ("draft=embedded", "optim.learning_rate=3e-3"),
}
HEAD = {  # how heads learn
    "smollm2_135m": (
        *("generate.hidden_states=true", "optim.learning_rate=1.1e-3"),
        "optim.per_device_train_batch_size=4",
    ),
    "embedded": (),
}
# As many steps as take about 20 minutes on SmolLM2's answers and 3 on the embedded target's (5 on
# slow cores), by the time of a few of each kind on two cores. The tables say what they took.
STEPS = {
    "plain": {"smollm2_135m": 2400, "embedded": 1050},
    "pard": {"smollm2_135m": 1200, "embedded": 425},
    "eagle3": {"smollm2_135m": 1700, "embedded": 400},
    "peagle": {"smollm2_135m": 1600, "embedded": 370},
    "medusa": {"smollm2_135m": 1700, "embedded": 290},
}
FORWARD_KL = 0.7  # share of the steps; then TVD
NAMES = {"plain": "plain", "pard": "PARD", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
NAMES |= {"medusa": "Medusa"}
ALONE, MANY, TREE = "1", "8", "tree"  # how a drafter is judged: rows at a time, or as a tree
JUDGED = {ALONE: "", MANY: "evaluate.timing_batch_size=8", TREE: "decode.tree=16"}
AS_TREES = ("eagle3", "medusa")
MOST = 8  # proposals, in the tables of tau


@dataclass(frozen=True)
class Judged:
    """A drafter that has learned and was judged.

    config: under which it is given. trained: the summary of its training. judged: of its
    evaluations, by the words of `JUDGED`.
    """

    kind: str
    config: Config
    trained: dict[str, Any]
    judged: Mapping[str, dict[str, Any]]

    def rows(self, temperature: str, label: str) -> Iterator[list[object]]:
        """Of the table of ways: the drafter alone, beside prompt lookup, and as a tree."""
        one, name = self.judged[label]["by_temperature"][temperature], NAMES[self.kind]
        yield row(name, one["ways"]["drafter"], one)
        yield row(f"{name} and prompt lookup", one["ways"][HYBRID])
        if label == ALONE and TREE in self.judged:
            tree = self.judged[TREE]["by_temperature"][temperature]
            yield row(f"{name}, as a tree", tree["ways"]["drafter"], tree)


def row(name: str, way: dict[str, Any], costs: dict[str, Any] | None = None) -> list[object]:
    """One of the `ways` of a summary, with the costs of its rounds where they are known."""
    known = [f"{costs[key]:.3f}" for key in ("cost_ratio", "verify_ratio")] if costs else ["", ""]
    gain = interval(way["speedup"]["end_to_end"], 2)
    speed = f"{way['tokens_per_second_end_to_end']:.1f}"
    return [name, proposals_text(way), interval(way["acceptance_length"], 2), *known, speed, gain]


def tables(drafters: Sequence[Judged], guessed: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """What the drafters of a target are, cost and gain. guessed: tau of prompt lookup by
    temperature, at 1, 2, ... proposals."""
    lines: list[list[object]] = [
        [
            NAMES[one.kind],
            f"{weight_count(ModelFolder(one.config.draft).config) / 1e6:.1f} M",
            *(one.trained[key] for key in ("source", "divergence", "steps", "best_step")),
            f"{one.trained['seconds'] / 60:.1f}",
        ]
        for one in drafters
    ]
    head = ["drafter", "weights", "source", "divergence", "steps", "best after", "minutes"]
    yield render("table.md", rows=[head, *lines])
    for temperature, lookup in guessed.items():
        lines = [["prompt lookup", *(f"{tau:.2f}" for tau in lookup[:MOST])]]
        for one in drafters:
            taus = one.judged[ALONE]["by_temperature"][temperature]["acceptance_length_by_k"]
            known = [taus[str(k)] for k in range(1, MOST + 1)]
            lines.append([NAMES[one.kind], *(f"{tau['mean']:.2f}" for tau in known)])
        head = [f"T = {temperature}: tau at K =", *range(1, MOST + 1)]
        yield render("table.md", rows=[head, *lines])
        for label in (ALONE, MANY):
            way = drafters[0].judged[label]["by_temperature"][temperature]["ways"][LOOKUP]
            plain = f"{way['plain_tokens_per_second_end_to_end']:.1f}"
            lines = [["plain decoding", 0, 1, "", "", plain, 1], row("prompt lookup", way)]
            lines += [line for one in drafters for line in one.rows(temperature, label)]
            head = [f"T = {temperature}, {label} at a time", "K", "tau", "c", "v", "tokens/s"]
            yield render("table.md", rows=[[*head, "end to end"], *lines])


def made(stage: str, config: Config) -> Path:
    """The folder of `train` or `evaluate`, complete."""
    return ensure({one.name: one for one in (TRAIN, EVALUATE)}[stage], config)


def alone(stage: str, config: Config) -> Path:
    """The same in a process of its own, as a command would make it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(made, stage, config).result()


def learning(target: str, kind: str) -> list[str]:
    """The settings by which a drafter of `kind` is made and learns."""
    steps = STEPS[kind][target]
    cut = kind in ("plain", "pard")
    own = [*CUT[target], f"draft.kind={kind}"] if cut else [f"draft={kind}", *HEAD[target]]
    warmup = f"divergence.warmup_steps={round(FORWARD_KL * steps)}"
    return [*LEARNING[target], f"optim.max_steps={steps}", "divergence.name=tvd", warmup, *own]


def judge(target: str, kind: str, words: Sequence[str]) -> Judged:
    """A drafter of `kind`, trained and judged with `words` behind all other settings."""

    def config(label: str, *own: str) -> Config:
        settings = [EXPERIMENT, f"target={target}", *TARGETS[target], *own, *words]
        made = compose_config(settings)
        name = made.name if label == ALONE else f"{made.name}_{label}"
        return replace(made, name=name, job=f"{target},{kind}")

    trained = alone(TRAIN.name, config(ALONE, *learning(target, kind)))
    given = (f"draft.path={trained / DRAFT}", "evaluate.draft=given")
    judged = {}
    for label, setting in JUDGED.items():
        if label != TREE or kind in AS_TREES:
            own = config(label, *given, *filter(None, [setting]))
            judged[label] = read_json(alone(EVALUATE.name, own) / SUMMARY)
    return Judged(kind, config(ALONE, *given), read_json(trained / SUMMARY), judged)


def lookups(config: Config, temperatures: Sequence[str]) -> dict[str, list[float]]:
    """tau of prompt lookup on the answers that judge, by temperature."""
    at = {f"{one.sampling.temperature:g}": one for one in at_temperatures(config)}
    answers = {key: read_contexts(plan(CONTEXTS, at[key]).path, "test") for key in temperatures}
    return {key: guessed_lengths(PromptLookup(), texts) for key, texts in answers.items()}


def run(words: Sequence[str]) -> None:
    """Make what is missing, and write and print the tables."""
    chosen = [word.removeprefix("target=") for word in words if word.startswith("target=")]
    words = [word for word in words if word != EXPERIMENT and not word.startswith("target=")]
    if unknown := {*chosen} - {*TARGETS}:
        raise ValueError(f"target={unknown.pop()}: this experiment has {' and '.join(TARGETS)}")
    texts = []
    for target in chosen or TARGETS:
        drafters = [judge(target, kind, words) for kind in STEPS]
        guessed = lookups(drafters[0].config, [*drafters[0].judged[ALONE]["by_temperature"]])
        texts += [f"## {target}\n", *tables(drafters, guessed)]
    config = compose_config([EXPERIMENT, "target=embedded", *words])
    file = Path(config.root) / config.name / "kinds.md"
    write_text(file, "\n".join(texts))
    print(*texts, f"These tables: {file}", sep="\n")


if __name__ == "__main__":
    with guarded("kinds"):
        run(sys.argv[1:])
