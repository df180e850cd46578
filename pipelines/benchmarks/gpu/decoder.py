"""Part c: the decoder on models of random weights, with acceptance given and costs real.

An 8 B target with drafters of 1 B and 0.15 B, beside Hugging Face's plain generation (static cache,
compiled) and its assisted one, in turns. What decides comes first; what time is left for, next.
`captured` code is eager, replayed as a CUDA graph, and made in a second; `compiled` code takes
longer to make and runs faster. How much longer, a target of four layers tells first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from draftkit.config import PretrainConfig, SamplingConfig
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.judge import Prompts
from draftkit.evaluation.walltime import Setting
from draftkit.models.adapter import CausalAdapter
from draftkit.models.devices import resolve_device
from pipelines.benchmarks.ceilings import copy_bandwidth
from pipelines.benchmarks.decoder import (
    HF_ASSISTED,
    HF_STATIC,
    PLAIN,
    SPECULATIVE,
    Pair,
    Point,
    measure,
    setting_of,
)
from pipelines.benchmarks.forced import GIVEN, GivenAcceptance, acceptance_given
from pipelines.benchmarks.gpu.part import Part
from pipelines.benchmarks.random_models import random_model, random_texts, shape

PROBED_LAYERS = 4
CAPTURED, COMPILED = "captured", "compiled"
# Seconds that steps may take on a GPU before one has been timed: guesses.
CAPTURED_GUESS, PEER_GUESS, PROBE_GUESS = 25.0, 70.0, 25.0


@dataclass(frozen=True)
class Size:
    """Shapes of models and texts, and how often what is timed."""

    target: PretrainConfig
    drafts: dict[str, PretrainConfig]  # the first is what most is held against
    vocab_size: int
    prompt_tokens: int
    new_tokens: int
    chunks: int
    turns: int  # of calibration
    batch_sizes: tuple[int, ...]
    gammas: tuple[int, ...]
    rates: tuple[float, ...]  # of acceptance; the first is what most is held against


REAL = Size(
    target=shape(32, 4096, 14336, 32, 2048),
    drafts={"0.15B": shape(6, 768, 3072, 12, 2048), "1B": shape(16, 2048, 8192, 32, 2048)},
    vocab_size=128_256,
    prompt_tokens=32,
    new_tokens=128,
    chunks=6,
    turns=6,
    batch_sizes=(1, 8),
    gammas=(4, 8),
    rates=(0.8, 0.5),
)
REHEARSED = Size(
    target=shape(1, 32, 64, 4, 128),
    drafts={"0.15B": shape(1, 16, 32, 4, 128), "1B": shape(1, 32, 32, 4, 128)},
    vocab_size=300,
    prompt_tokens=4,
    new_tokens=6,
    chunks=2,
    turns=1,
    batch_sizes=(2,),
    gammas=(2,),
    rates=(0.8,),
)


@dataclass(frozen=True)
class Case:
    """One setting, and the methods that take turns in it."""

    code: str
    batch_size: int
    gamma: int
    draft: str
    rate: float
    methods: tuple[str, ...] = (PLAIN, SPECULATIVE)

    @property
    def peers(self) -> list[str]:
        """Those of the methods that are Hugging Face's."""
        return [method for method in self.methods if method.startswith("hf_")]

    @property
    def name(self) -> str:
        """As the report has it."""
        beside = "".join(f", beside {peer}" for peer in self.peers)
        return (
            f"{self.code}, batch {self.batch_size}, gamma {self.gamma}, "
            f"{self.draft} at {self.rate:g}{beside}"
        )


def cases(size: Size) -> Iterator[Case]:
    """All of them, the most important first."""
    gamma, draft, best = size.gammas[0], next(iter(size.drafts)), size.rates[0]
    ours = (PLAIN, SPECULATIVE)
    yield Case(CAPTURED, 1, gamma, draft, best, (*ours, HF_ASSISTED))
    for rate in size.rates:
        yield Case(COMPILED, 1, gamma, draft, rate)
    yield Case(COMPILED, 1, gamma, draft, best, (PLAIN, HF_STATIC))
    yield Case(COMPILED, 1, gamma, draft, best, (*ours, HF_ASSISTED))
    for rate in size.rates[1:]:
        yield Case(CAPTURED, 1, gamma, draft, rate, (*ours, HF_ASSISTED))
    for other, number, rows in product(size.drafts, size.gammas, size.batch_sizes):
        if (other, number, rows) != (draft, gamma, 1):
            for rate in size.rates:
                yield Case(CAPTURED, rows, number, other, rate)


class Bench:
    """The models, and how long their code takes to be made."""

    def __init__(self, part: Part, size: Size) -> None:
        self.part = part
        self.size = size
        self.device = resolve_device(part.config.hardware)
        self.verifier = GivenAcceptance(self.device)
        self.copied = copy_bandwidth(self.device)
        self.target = self.model(size.target, 0)
        self.drafts = {
            name: self.model(draft, 1 + number)
            for number, (name, draft) in enumerate(size.drafts.items())
        }

    def model(self, shape: PretrainConfig, seed: int) -> CausalAdapter:
        hardware, size = self.part.config.hardware, self.size
        return random_model(shape, hardware, vocab_size=size.vocab_size, seed=seed)

    def about(self) -> dict[str, Any]:
        """What is known before anything is decoded."""
        models = {"target": self.target, **self.drafts}
        return {
            "copy_bytes_per_second": self.copied,
            "weight_bytes": {name: model.weight_bytes for name, model in models.items()},
            "copy_seconds_of_target": self.target.weight_bytes / self.copied,
        }

    def prompts(self, count: int) -> Prompts:
        """So many texts of random tokens, and two for calibration."""
        size, seed = self.size, self.part.config.seed
        texts = random_texts(count + 2, size.prompt_tokens, vocab_size=size.vocab_size, seed=seed)
        return Prompts(test=texts[:count], calibration=texts[count:])

    def setting(self, case: Case, prompts: Prompts) -> Setting:
        """How `case` decodes; on a CPU eagerly."""
        on_gpu = self.device.type == "cuda"
        return replace(
            setting_of(
                prompts,
                SamplingConfig(temperature=1.0),
                max_new_tokens=self.size.new_tokens,
                gamma=max(self.size.gammas),
                seed=self.part.config.seed,
            ),
            gamma=case.gamma,
            verification=GIVEN,
            batch_size=case.batch_size,
            compiled=on_gpu and case.code == COMPILED,
            captured=on_gpu and case.code == CAPTURED,
        )

    def run(self, case: Case, target: CausalAdapter | None = None) -> dict[str, Any]:
        """Points of the methods of `case`, and seconds that went into making code."""
        prompts = self.prompts(self.size.chunks * case.batch_size)
        setting, making = self.setting(case, prompts), -compile_seconds()
        pair = Pair(target or self.target, self.drafts[case.draft], (), 0)
        with acceptance_given(self.verifier, case.rate, assisted=HF_ASSISTED in case.methods):
            points = measure(pair, prompts, setting, case.methods, turns=self.size.turns)
        found = {"making_seconds": making + compile_seconds(), "rate": case.rate}
        found |= {"code": case.code, "draft": case.draft, "points": points}
        return found | self.roofline(pair, points)

    def roofline(self, pair: Pair, points: list[Point]) -> dict[str, Any]:
        """The share of a copy's bytes a second at which plain decoding reads the weights.

        Without the prefill, which reads them once for many tokens; a step reads them for all rows.
        """
        plain = points[0]
        steps = plain["tokens"] / plain["batch_size"]
        seconds = (plain["seconds"] - plain["prefill_seconds"]) / steps
        bytes_per_second = pair.target.weight_bytes / seconds
        return {"plain_step_seconds": seconds, "fraction_of_copy": bytes_per_second / self.copied}


def probe(bench: Bench) -> dict[str, float]:
    """Seconds to make code of plain steps of a target of a few layers, and to run a step."""
    few = replace(bench.size.target, num_hidden_layers=PROBED_LAYERS)
    target, found = bench.model(few, 9), {}
    for code in (CAPTURED, COMPILED):
        case = Case(code, 1, 0, next(iter(bench.size.drafts)), 0.0, (PLAIN,))
        result = bench.run(case, target)
        found[f"{code}_making_seconds"] = result["making_seconds"]
        found[f"{code}_step_seconds"] = result["plain_step_seconds"]
    return found


def compiled_guess(bench: Bench, probed: dict[str, float] | None) -> float:
    """Seconds of the first compiled case: its units, each in proportion to its layers."""
    if probed is None:
        return 150.0
    size = bench.size
    draft = next(iter(size.drafts.values()))
    passes = 3  # of the target: plain, verifying, and verifying to measure o
    layers = passes * size.target.num_hidden_layers
    layers += size.gammas[0] * draft.num_hidden_layers
    return CAPTURED_GUESS + probed["compiled_making_seconds"] * layers / PROBED_LAYERS


def run(part: Part) -> None:
    """Make the models, then measure what there is time for."""
    bench = part.step(
        "models",
        lambda: Bench(part, REHEARSED if part.rehearses else REAL),
        needed=True,
        kept=False,
    )
    assert bench is not None
    part.step("about", bench.about)
    probed = part.step("probe of four layers", lambda: probe(bench), guess=PROBE_GUESS)
    compiling, made = compiled_guess(bench, probed), set()
    for case in cases(bench.size):
        code = (case.code, case.batch_size, case.gamma, case.draft)
        guess, kind = PEER_GUESS if case.peers else CAPTURED_GUESS, f"{code[:2]} {case.peers}"
        if case.code == COMPILED and code not in made:
            guess, kind = compiling, ""
        if part.step(case.name, lambda case=case: bench.run(case), kind=kind, guess=guess):
            made.add(code)
