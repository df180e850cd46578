"""Evaluations of drafters whose truth is known, put together from drawn documents.

`coverage`: how often intervals hold the truth, where answers to one prompt and turns of one chat
are alike and few documents hold most tokens; `tied_coverage`, where long answers are accepted more
often than short ones, or less. `starred`: how often the way with the star is stated too high, where
all are equally good. `named`: how often a drafter that gains nothing is
named, through all that is chosen on the way: gamma by the measured acceptance and costs, and the
best of four ways.

    python -m tests.evaluation.simulated    # the table of all cells, at full counts
"""

import math
import operator
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftkit.config import Config, DecodeConfig, EvaluateConfig, SamplingConfig
from draftkit.decoding.generation import Completion
from draftkit.evaluation.alpha import PromptTotals, estimates
from draftkit.evaluation.choice import HYBRID, LOOKUP
from draftkit.evaluation.intervals import acceptance_length, estimate, proportion, speedup
from draftkit.evaluation.lossless import Losslessness
from draftkit.evaluation.measure import Measured
from draftkit.evaluation.summary import best_of, best_use, summarise, ways_beside
from draftkit.evaluation.walltime import PLAIN, Chunk, Timed
from draftkit.theory.acceptance import Rate
from draftkit.theory.speedup import Costs

CHATS = 0  # answers a document: 1 to 12, as chats have turns
ANSWERS = (1, 4, 16, CHATS)
DOCUMENTS = (20, 48, 96)
MEANS = (0.1, 0.5, 0.9)
SPREAD = 0.08  # standard deviation of acceptance between documents
SIGMA = 1.2  # of the logarithm of the length of an answer
GAIN = 0.03  # of the drafter over the one before it, more on some documents than on others


def rates(mean: float, count: int, generator: torch.Generator) -> Tensor:
    """Acceptance of so many documents: beta distributed [count]."""
    weight = mean * (1 - mean) / SPREAD**2 - 1
    shape = torch.tensor([mean * weight, (1 - mean) * weight], dtype=torch.float64)
    drawn = torch._standard_gamma(shape.expand(count, 2), generator)
    return drawn[:, 0] / drawn.sum(-1)


def lengths(count: int, generator: torch.Generator, *, most: int = 4096) -> Tensor:
    """Tokens of so many answers: lognormal [count]."""
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return (3.5 + SIGMA * normal).exp().ceil().clamp(1, most)


def scored(
    documents: int, answers: int, mean: float, generator: torch.Generator
) -> tuple[PromptTotals, PromptTotals]:
    """A drafter on that many documents, and the one before it, worse by `GAIN`."""
    of = torch.arange(documents)
    if answers == CHATS:
        of = of.repeat_interleave(torch.randint(1, 13, (documents,), generator=generator))
    else:
        of = of.repeat_interleave(answers)
    counts = lengths(len(of), generator)
    rate = rates(mean, documents, generator)
    lost = 2 * GAIN * torch.rand(documents, generator=generator, dtype=torch.float64)
    after = torch.binomial(counts, rate[of], generator=generator)
    before = after - lost[of] * counts
    names = [f"document {number}" for number in of.tolist()]
    return tuple(
        PromptTotals({"alpha": totals}, counts, documents=names) for totals in (after, before)
    )


def coverage(
    documents: int, answers: int, mean: float, *, repetitions: int, seed: int = 0
) -> dict[str, float]:
    """The share of evaluations in which the interval of alpha, and of its gain, holds the truth."""
    generator = torch.Generator().manual_seed(seed)
    held = dict.fromkeys(("alpha", "gain"), 0)
    for _ in range(repetitions):
        after, before = scored(documents, answers, mean, generator)
        held["alpha"] += not estimates(after)["alpha"].excludes(mean)
        held["gain"] += not after.gain(before).excludes(GAIN)
    return {name: count / repetitions for name, count in held.items()}


# Lengths that go with alpha

TIES = (0.8, -0.8)  # correlation of the log of a document's length with its log-odds of acceptance
TIED_MEANS = (0.05, 0.5, 0.95)
TIED_DOCUMENTS = (20, 40, 96)


def tied(
    documents: int, mean: float, tie: float, generator: torch.Generator
) -> dict[str, tuple[Rate, ...]]:
    """What is estimated of documents whose lengths go with their acceptance, by its name.

    The drafter before is worse by 0 to 0.3 of the log-odds. Two proposals a round, each of which
    costs 0.15 of a step.
    """
    normal, other, noise, swift = torch.randn(
        4, documents, generator=generator, dtype=torch.float64
    )
    tokens = (4 + SIGMA * (tie * normal + (1 - tie**2) ** 0.5 * other)).exp().clamp(min=4).round()
    odds = math.log(mean / (1 - mean)) + 0.5 * normal
    lost = 0.3 * torch.rand(documents, generator=generator, dtype=torch.float64)
    rate, before = odds.sigmoid(), (odds - lost).sigmoid()
    accepted = torch.binomial(tokens, rate, generator=generator)
    kept = torch.binomial(accepted, before / rate, generator=generator)
    rounds = tokens / tau(rate, 2) * (1 + 0.3 * noise / tokens.sqrt())
    seconds = 1.3 * rounds * (0.1 * swift).exp()
    return {
        "alpha": (Rate(accepted, tokens),),
        "gain": (Rate(accepted, tokens), Rate(kept, tokens)),
        "tau": (Rate(tokens, rounds),),
        "speed-up": (Rate(tokens, seconds), Rate(tokens, tokens)),
    }


MADE = {
    "alpha": proportion,
    "gain": partial(estimate, compare=operator.sub),
    "tau": partial(acceptance_length, gamma=2),
    "speed-up": speedup,
}


def tied_coverage(
    documents: int, mean: float, tie: float, *, repetitions: int, seed: int = 0
) -> dict[str, float]:
    """The share of such evaluations in which each interval holds the truth."""
    generator = torch.Generator().manual_seed(seed)
    many = tied(1_000_000, mean, tie, generator)
    truth = {name: make(*many[name]).mean for name, make in MADE.items()}
    held = dict.fromkeys(MADE, 0)
    for _ in range(repetitions):
        drawn = tied(documents, mean, tie, generator)
        for name, make in MADE.items():
            held[name] += not make(*drawn[name]).excludes(truth[name])
    return {name: count / repetitions for name, count in held.items()}


# Ways that gain nothing

GAMMAS = range(1, 5)
ALPHA = 0.5
COST, OVERHEAD = 0.1, 0.05
CONFIG = Config(decode=DecodeConfig(gamma=1), evaluate=EvaluateConfig())


@dataclass(frozen=True)
class Nothing:
    """Ways to draft of which none gains anything, at any gamma.

    work: by gamma, passes of the target a document would need for one token, on average, which a
    round's cost makes up for. noise: of the time of a chunk, the standard deviation of its log.
    """

    documents: int
    noise: float
    work: dict[int, float]

    @staticmethod
    def of(documents: int, noise: float) -> "Nothing":
        drawn = rates(ALPHA, 200_000, torch.Generator().manual_seed(1))
        work = {g: float((1 / tau(drawn, g)).mean()) for g in GAMMAS}
        return Nothing(documents, noise, work)

    def costs(self, generator: torch.Generator) -> Costs:
        """Measured costs, by which each gamma seems to gain nothing but for their errors."""
        errors = 1 + 0.02 * torch.randn(len(GAMMAS), generator=generator, dtype=torch.float64)
        verify = {
            g: float(error) / self.work[g] - COST * g - OVERHEAD
            for g, error in zip(GAMMAS, errors, strict=True)
        }
        return Costs(0.02, COST, verify[1], OVERHEAD, verify)

    def measured(self, generator: torch.Generator) -> Measured:
        """A draft and the one before it, each decoded at the gamma that seemed best for it."""
        names = [f"document {number}" for number in range(self.documents)]
        plain = self.timed(torch.ones(self.documents, dtype=torch.float64), generator, names)
        rate, *others = (rates(ALPHA, self.documents, generator) for _ in range(3))
        lookup, hybrid = (self.timed(self.gains(one, 4), generator, names) for one in others)
        scored, costs, lossless = {}, {}, {}
        timed = {PLAIN: plain, LOOKUP: lookup, HYBRID: hybrid}
        for draft in ("before", "after"):
            rate = (rate + 0.02 * torch.randn(len(rate), generator=generator)).clamp(0.01, 0.99)
            counts = lengths(self.documents, generator)
            totals = {"alpha": torch.binomial(counts, rate, generator=generator)}
            scored[draft] = PromptTotals(totals, counts, documents=names)
            costs[draft], lossless[draft] = self.costs(generator), Losslessness(32, 0, 0)
            found = Measured(scored, timed | {draft: plain}, costs, lossless)
            best = summarise(found, draft, SamplingConfig(), CONFIG)["best_gamma"]
            gains = self.gains(rate, min(max(best, 1), max(GAMMAS)))
            timed[draft] = self.timed(gains, generator, names)
        return Measured(scored, timed, costs, lossless)

    def gains(self, rate: Tensor, gamma: int) -> Tensor:
        """The factor by which documents of these acceptances are decoded faster [P]."""
        return tau(rate, gamma) * self.work[gamma]

    def timed(self, gains: Tensor, generator: torch.Generator, names: list[Hashable]) -> Timed:
        """Chunks of one prompt each, whose lengths are drawn anew: the texts are sampled."""
        tokens = lengths(len(gains), generator, most=256)
        normal = torch.randn(len(gains), generator=generator, dtype=torch.float64)
        noise = (self.noise * normal - self.noise**2 / 2).exp()
        seconds = 0.02 * tokens / gains * noise
        return chunked(tokens, seconds, names)


def chunked(tokens: Tensor, seconds: Tensor, names: list[Hashable]) -> Timed:
    """A chunk of each document."""
    chunks = []
    for count, time in zip(tokens.long().tolist(), seconds.tolist(), strict=True):
        answer = Completion([], range(count), accept_counts=[count, 0])
        chunks.append(Chunk(0.01, time, [answer]))
    return Timed(chunks, names, gamma=1)


WAYS = {LOOKUP: LOOKUP, "drafter": "after", HYBRID: HYBRID, "before": "before"}


def tau(rate: Tensor, gamma: int) -> Tensor:
    """Tokens a pass at these acceptances [P]."""
    return sum((rate**i for i in range(1, gamma + 1)), start=torch.ones_like(rate))


def named(documents: int, *, noise: float, repetitions: int, seed: int = 0) -> dict[str, float]:
    """How often ways that gain nothing are named: by the verdict, as the best, or by either.

    held: how often the interval of the judged one's speed-up holds 1, which is its truth.
    """
    generator, nothing = torch.Generator().manual_seed(seed), Nothing.of(documents, noise)
    counts = dict.fromkeys(("deploy", "best_of", "either", "held"), 0)
    for _ in range(repetitions):
        measured = nothing.measured(generator)
        timed, summary = measured.timed, summarise(measured, "after", SamplingConfig(), CONFIG)
        ways = ways_beside(timed, WAYS, "drafter", measured.lossless)
        use = best_use(summary, ways)
        found = [use["verdict"] == "deploy", best_of(ways, "drafter") != "none"]
        low, high = summary["speedup"]["end_to_end"]["ci95"]
        hits = (*found, any(found), low <= 1 <= high)
        for name, hit in zip(counts, hits, strict=True):
            counts[name] += hit
    return {name: count / repetitions for name, count in counts.items()}


LIKENESS = (0.0, 0.7)  # correlation of the log of the times of two ways on a document


def starred(
    documents: int, speed: float, likeness: float, *, repetitions: int, seed: int = 0
) -> float:
    """How often the interval of the way with the star lies above the speed-up of all four ways."""
    generator, high = torch.Generator().manual_seed(seed), 0
    names = [f"document {number}" for number in range(documents)]
    for _ in range(repetitions):
        common, *own = torch.randn(5, documents, generator=generator, dtype=torch.float64)
        tokens = lengths(documents, generator, most=256)
        timed = {PLAIN: chunked(tokens, tokens, names)}
        for name, normal in zip(WAYS.values(), own, strict=True):
            factor = 0.2 * (likeness**0.5 * common + (1 - likeness) ** 0.5 * normal)
            timed[name] = chunked(tokens, tokens / speed * (factor - 0.02).exp(), names)
        ways = ways_beside(timed, WAYS, "drafter", {})
        best = best_of(ways, "drafter")
        high += best != "none" and ways[best]["speedup"]["end_to_end"]["ci95"][0] > speed
    return high / repetitions


def table() -> Iterator[str]:
    """Every cell at full counts, a line each."""
    for answers in ANSWERS:
        for documents in DOCUMENTS:
            for mean in MEANS:
                held = coverage(documents, answers, mean, repetitions=5000)
                label = f"{answers or 'chats':>5} answers, {documents:2} documents, mean {mean}"
                yield f"{label}: alpha {held['alpha']:.1%}, gain {held['gain']:.1%}"
    for documents in TIED_DOCUMENTS:
        for mean in TIED_MEANS:
            for tie in TIES:
                held = tied_coverage(documents, mean, tie, repetitions=2000)
                shares = ", ".join(f"{name} {share:.1%}" for name, share in held.items())
                yield f"lengths tied by {tie}, {documents:2} documents, mean {mean}: {shares}"
    for likeness in LIKENESS:
        high = starred(24, 1.2, likeness, repetitions=5000)
        yield f"four ways of 1.2, alike by {likeness}: the star is too high in {high:.1%}"
    for documents in (20, EvaluateConfig().timing_prompts):
        for noise in (0.05, 0.35):
            found = named(documents, noise=noise, repetitions=10_000)
            shares = ", ".join(f"{name} {share:.2%}" for name, share in found.items())
            yield f"nothing gained, {documents} documents, noise {noise}: {shares}"


if __name__ == "__main__":
    for line in table():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
