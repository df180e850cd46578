"""Part c: the decoder on models of random weights, with acceptance given and costs real.

An 8 B target with drafters of 1 B and 0.15 B, beside Hugging Face's plain generation (static cache,
compiled) and its assisted one, in turns. What decides comes first; what time is left for, next.
`captured` code is eager, replayed as a CUDA graph, and made in a second; `compiled` code takes
longer to make and runs faster. How much longer, a target of four layers tells first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from draftkit.config import PretrainConfig, SamplingConfig
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.judge import Prompts
from draftkit.models.adapter import CausalAdapter

from ..ceilings import copy_bandwidth
from ..decoder import (
    HF_ASSISTED,
    HF_STATIC,
    PLAIN,
    SPECULATIVE,
    Pair,
    measure,
    setting_of,
)
from ..forced import GIVEN, GivenAcceptance, acceptance_given
from ..random_models import TINY, random_model, random_texts, shape
from .part import Part

PROBED_LAYERS = 4
CAPTURED, COMPILED = "captured", "compiled"
DRAFTS = {"0.15B": shape(6, 768, 3072, 12, 2048), "1B": shape(16, 2048, 8192, 32, 2048)}
MAIN = "0.15B"  # what most is held against
# Seconds that steps may take on a GPU before one has been timed: guesses.
CAPTURED_GUESS, PEER_GUESS, PROBE_GUESS = 25.0, 70.0, 25.0


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
    def beside(self) -> str:
        """Hugging Face's among the methods."""
        return "".join(f", beside {one}" for one in self.methods if one.startswith("hf_"))

    @property
    def name(self) -> str:
        """As the report has it."""
        setting = f"{self.code}, batch {self.batch_size}, gamma {self.gamma}"
        return f"{setting}, {self.draft} at {self.rate:g}{self.beside}"


def cases(
    gammas: Sequence[int], rates: Sequence[float], batch_sizes: Sequence[int]
) -> Iterator[Case]:
    """All of them, the most important first; so are the gammas and the rates of acceptance."""
    gamma, best = gammas[0], rates[0]
    assisted = (PLAIN, SPECULATIVE, HF_ASSISTED)
    yield Case(CAPTURED, 1, gamma, MAIN, best, assisted)
    for rate in rates:
        yield Case(COMPILED, 1, gamma, MAIN, rate)
    yield Case(COMPILED, 1, gamma, MAIN, best, (PLAIN, HF_STATIC))
    yield Case(COMPILED, 1, gamma, MAIN, best, assisted)
    for rate in rates[1:]:
        yield Case(CAPTURED, 1, gamma, MAIN, rate, assisted)
    for draft, number, rows in product(DRAFTS, gammas, batch_sizes):
        if (draft, number, rows) != (MAIN, gamma, 1):
            for rate in rates:
                yield Case(CAPTURED, rows, number, draft, rate)


class Bench:
    """The models, and how long their code takes to be made."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.vocab_size = part.size(128_256, 300)
        self.gammas = part.size((4, 8), (2,))
        self.shape = part.size(shape(32, 4096, 14336, 32, 2048), TINY)
        self.verifier = GivenAcceptance(part.device)
        self.copied = copy_bandwidth(part.device)
        self.target = self.model(self.shape, 0)
        self.drafts = {
            name: self.model(part.size(draft, TINY), seed)
            for seed, (name, draft) in enumerate(DRAFTS.items(), 1)
        }

    def model(self, shape: PretrainConfig, seed: int) -> CausalAdapter:
        hardware = self.part.config.hardware
        return random_model(shape, hardware, vocab_size=self.vocab_size, seed=seed)

    def about(self) -> dict[str, Any]:
        """What is known before anything is decoded."""
        models = {"target": self.target, **self.drafts}
        return {
            "copy_bytes_per_second": self.copied,
            "weight_bytes": {name: model.weight_bytes for name, model in models.items()},
            "copy_seconds_of_target": self.target.weight_bytes / self.copied,
        }

    def run(self, case: Case, target: CausalAdapter | None = None) -> dict[str, Any]:
        """Points of the methods of `case`, and seconds that went into making code.

        Beside them the share of a copy's bytes a second at which plain decoding reads the weights:
        without the prefill, which reads them once for many tokens; a step reads them for all rows.
        """
        size, seed, target = self.part.size, self.part.config.seed, target or self.target
        count, calibrating = size(6, 2) * case.batch_size, 2
        texts = random_texts(
            count + calibrating, size(32, 4), vocab_size=self.vocab_size, seed=seed
        )
        prompts = Prompts(test=texts[:count], calibration=texts[count:])
        on_gpu = self.part.device.type == "cuda"
        setting = setting_of(
            prompts,
            sampling=SamplingConfig(temperature=1.0),
            max_new_tokens=size(128, 6),
            gamma=case.gamma,
            most_gamma=max(self.gammas),
            seed=seed,
            verification=GIVEN,
            batch_size=case.batch_size,
            compiled=on_gpu and case.code == COMPILED,
            captured=on_gpu and case.code == CAPTURED,
        )
        making, pair = -compile_seconds(), Pair(target, self.drafts[case.draft])
        with acceptance_given(self.verifier, case.rate, assisted=HF_ASSISTED in case.methods):
            points = measure(pair, prompts, setting, case.methods, turns=size(6, 1))
        plain = points[0]
        seconds = plain["seconds"] - plain["prefill_seconds"]
        step = seconds * plain["batch_size"] / plain["tokens"]
        return {
            "making_seconds": making + compile_seconds(),
            "rate": case.rate,
            "code": case.code,
            "draft": case.draft,
            "points": points,
            "plain_step_seconds": step,
            "fraction_of_copy": target.weight_bytes / step / self.copied,
        }


def probe(bench: Bench) -> dict[str, float]:
    """Seconds to make code of plain steps of a target of a few layers, and to run a step."""
    few = replace(bench.shape, num_hidden_layers=PROBED_LAYERS)
    target, seconds = bench.model(few, 9), {}
    for code in (CAPTURED, COMPILED):
        case = Case(code, 1, 0, MAIN, 0.0, (PLAIN,))
        result = bench.run(case, target)
        seconds[f"{code}_making_seconds"] = result["making_seconds"]
        seconds[f"{code}_step_seconds"] = result["plain_step_seconds"]
    return seconds


def compiled_guess(bench: Bench, probed: dict[str, float] | None) -> float:
    """Seconds of the first compiled case: its units, each in proportion to its layers."""
    if probed is None:
        return 150.0
    passes = 3  # of the target: plain, verifying, and verifying to measure o
    layers = passes * bench.shape.num_hidden_layers
    layers += bench.gammas[0] * DRAFTS[MAIN].num_hidden_layers
    return CAPTURED_GUESS + probed["compiled_making_seconds"] * layers / PROBED_LAYERS


def run(part: Part) -> None:
    """Make the models, then measure what there is time for."""
    bench = part.step("models", lambda: Bench(part), needed=True, kept=False)
    assert bench is not None
    part.step("about", bench.about)
    probed = part.step("probe of four layers", lambda: probe(bench), guess=PROBE_GUESS)
    compiling, made = compiled_guess(bench, probed), set()
    for case in cases(bench.gammas, part.size((0.8, 0.5), (0.8,)), part.size((1, 8), (2,))):
        code = (case.code, case.batch_size, case.gamma, case.draft)
        guess, kind = PEER_GUESS if case.beside else CAPTURED_GUESS, case.code + case.beside
        if case.code == COMPILED and code not in made:
            guess, kind = compiling, ""
        if part.step(case.name, lambda case=case: bench.run(case), kind=kind, guess=guess):
            made.add(code)
