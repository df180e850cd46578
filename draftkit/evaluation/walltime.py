"""Wall time: what speculation buys, measured beside its baseline, and what it costs by part.

*Measured*: the same prompts are decoded plainly and with each draft, in turns, in one process,
after a warm-up; tokens are counted the same way (cut at the end of text and at the length limit)
and time runs from the first round after the prefill, which is reported apart. *Calibrated*, on
other prompts: the median time of a draft unit, of a verification and of the rest of a round, as
ratios to a plain step; the theory predicts from these and never from the timed generations.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder, tokens_needed
from draftkit.decoding.generation import DRAFT_ID, Completion, make_requests, record
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import Estimate, estimate_quotient

PLAIN = "plain"
OVERHEAD_GAMMA = 2
CALIBRATION_ROUNDS = 24


@dataclass(frozen=True)
class Setting:
    """How timed generations are made."""

    sampling: SamplingConfig
    max_new_tokens: int
    gamma: int
    verification: str
    batch_size: int
    eos_token_ids: Sequence[int]
    seed: int


@dataclass
class Timed:
    """Decoding times of one method, by chunk of prompts, and its completions by prompt."""

    seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """All committed tokens over all decoding seconds."""
        return sum(self.tokens) / sum(self.seconds)


@dataclass(frozen=True)
class Costs:
    """Parts of a round in units of a plain step (which stands in seconds)."""

    plain_seconds: float
    cost_ratio: float  # c: draft unit / (gamma x plain step)
    verify_ratio: float  # v at the gamma in use
    overhead_ratio: float  # o, measured at gamma 2
    verify_ratios: dict[int, float]  # v by gamma

    def verify_at(self, gamma: int) -> float:
        """v(gamma), linear between the measured ones and beyond."""
        known = sorted(self.verify_ratios)
        right = next((g for g in known[1:] if g >= gamma), known[-1])
        left = known[known.index(right) - 1]
        slope = (self.verify_ratios[right] - self.verify_ratios[left]) / (right - left)
        return self.verify_ratios[left] + slope * (gamma - left)


def synchronised_clock(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that first waits for the device."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def make_decoder(
    target: Adapter, draft: Adapter | None, prompts: Sequence[Sequence[int]], setting: Setting
) -> Decoder:
    """A decoder of `setting.batch_size` rows that fits `prompts`, with `draft` attached."""
    gamma = setting.gamma if draft is not None else 0
    requests = make_requests(
        prompts, max_new_tokens=setting.max_new_tokens, sampling=setting.sampling, gamma=gamma
    )
    decoder = Decoder(
        target,
        slots=setting.batch_size,
        capacity=max(map(tokens_needed, requests)),
        eos_token_ids=setting.eos_token_ids,
        verification=setting.verification,
        clock=synchronised_clock(target.device),
    )
    if draft is not None:
        decoder.attach(DRAFT_ID, DraftModelProposer(draft))
    return decoder


def time_chunk(
    decoder: Decoder, prompts: Sequence[Sequence[int]], setting: Setting, gamma: int, first: int
) -> tuple[float, float, list[Completion]]:
    """Decode `prompts` together; return prefill seconds, decoding seconds, completions."""
    clock = synchronised_clock(decoder.target.device)
    requests = list(
        make_requests(
            prompts,
            max_new_tokens=setting.max_new_tokens,
            sampling=setting.sampling,
            gamma=gamma,
            seed=setting.seed,
            first_row=first,
        )
    )
    started = clock()
    slots = decoder.join(requests)
    while decoder.prefill():
        pass
    ready = clock()
    running = {
        slot: Completion(list(r.prompt_ids)) for slot, r in zip(slots, requests, strict=True)
    }
    left = set(slots)
    while left:
        for result in decoder.round():
            left -= set(record(running, result))
    finished = clock()
    decoder.leave(slots)
    return ready - started, finished - ready, [running[slot] for slot in slots]


def time_methods(
    target: Adapter,
    drafts: dict[str, Adapter],
    prompts: Sequence[Sequence[int]],
    warmup: Sequence[Sequence[int]],
    setting: Setting,
) -> dict[str, Timed]:
    """Time plain decoding and every draft on `prompts`, in turns, after one turn on `warmup`."""
    every = [*prompts, *warmup]
    decoders = {PLAIN: make_decoder(target, None, every, setting)}
    decoders |= {name: make_decoder(target, d, every, setting) for name, d in drafts.items()}
    gammas = {name: 0 if name == PLAIN else setting.gamma for name in decoders}
    for name, decoder in decoders.items():
        time_chunk(decoder, warmup[: setting.batch_size], setting, gammas[name], 0)
    timed = {name: Timed() for name in decoders}
    names = list(decoders)
    for turn, first in enumerate(range(0, len(prompts), setting.batch_size)):
        chunk = prompts[first : first + setting.batch_size]
        shift = turn % len(names)  # no method always goes first
        for name in names[shift:] + names[:shift]:
            prefill, seconds, completions = time_chunk(
                decoders[name], chunk, setting, gammas[name], first
            )
            timed[name].prefill_seconds.append(prefill)
            timed[name].seconds.append(seconds)
            timed[name].tokens.append(sum(len(c.output_ids) for c in completions))
            timed[name].completions += completions
    return timed


def measured_speedup(*, speculative: Timed, plain: Timed, seed: int, resamples: int) -> Estimate:
    """Tokens per second of `speculative` over those of `plain`, paired by chunk of prompts."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return estimate_quotient(
        totals=column(speculative.tokens),
        counts=column(speculative.seconds),
        baseline_totals=column(plain.tokens),
        baseline_counts=column(plain.seconds),
        seed=seed,
        resamples=resamples,
    )


def calibrate(
    target: Adapter, draft: Adapter, prompts: Sequence[Sequence[int]], setting: Setting
) -> Costs:
    """Measure c, v and o on `prompts`, which must not be the timed ones. Medians over rounds."""
    gammas = sorted({1, OVERHEAD_GAMMA, 8, setting.gamma} - {0})
    units = {gamma: round_units(target, draft, prompts, setting, gamma) for gamma in (0, *gammas)}
    plain = sum(units[0])
    gamma = max(setting.gamma, 1)
    return Costs(
        plain_seconds=plain,
        cost_ratio=units[gamma][0] / (gamma * plain),
        verify_ratio=units[gamma][1] / plain,
        overhead_ratio=units[OVERHEAD_GAMMA][2] / plain,
        verify_ratios={g: units[g][1] / plain for g in gammas},
    )


def round_units(
    target: Adapter,
    draft: Adapter,
    prompts: Sequence[Sequence[int]],
    setting: Setting,
    gamma: int,
) -> tuple[float, float, float]:
    """Median seconds of propose, verify and the rest over rounds of full batches at `gamma`."""
    setting = replace(setting, gamma=gamma, eos_token_ids=())
    chunk = (list(prompts) * setting.batch_size)[: setting.batch_size]
    decoder = make_decoder(target, draft if gamma else None, chunk, setting)
    parts: list[tuple[float, float, float]] = []
    while len(parts) < CALIBRATION_ROUNDS:
        slots = decoder.join(
            list(
                make_requests(
                    chunk,
                    max_new_tokens=setting.max_new_tokens,
                    sampling=setting.sampling,
                    gamma=gamma,
                    seed=setting.seed,
                    first_row=len(parts) * setting.batch_size,
                )
            )
        )
        while decoder.prefill():
            pass
        done = False
        while not done:
            results = decoder.round()
            done = any(flag for result in results for flag in result.done)
            parts += [result.seconds for result in results]
        decoder.leave(slots)
    kept = parts[2:]  # the first rounds warm up
    propose, verify, rest = (statistics.median(column) for column in zip(*kept, strict=True))
    return propose, verify, rest
