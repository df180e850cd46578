"""Wall time: what speculation buys, measured beside its baseline.

The same prompts are answered by every way, in turns, in one process, after a warm-up. A way is ours
or other people's code; the timer knows it by a name. Tokens are counted the same way (cut at the
end of text and at the length limit), and the prefill is kept apart from the rounds. Compiling takes
no time here: the clock stands still, and `graphs.compile_seconds` tells for how long. What a round
consists of: `costs`.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, Completion, make_requests, record
from draftkit.decoding.graphs import batch_size, compile_seconds
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.results import RoundSeconds
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import Rate

PLAIN = "plain"
# Proposals at which `costs` are measured beside those in use. Each number is code of its own, which
# takes longest to compile for many. Numbers between two, or beyond, lie on the line through them.
# Where numbers are chosen, guesses tell what the target's pass takes at `MOST_GAMMA`, and where
# levels of 4 bits are read at their best number: a draft's code for these is not made.
CALIBRATED_GAMMAS = (1, 4, 8)
MOST_GAMMA = 12  # proposals that are considered

PromptIds = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How timed generations are made."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_new_tokens: int
    gamma: int
    verification: str = "speculative"
    epsilon: float | None = None  # of typical acceptance
    batch_size: int = 1
    capacity: int  # cache slots of a row; one number for all, since compiled code depends on it
    eos_token_ids: Sequence[int] = ()
    seed: int = 0
    compiled: bool = False
    captured: bool = False  # eager code, on CUDA


class Chunk(NamedTuple):
    """What it took to answer a batch of prompts, and the answers."""

    prefill_seconds: float
    seconds: float  # after the prefill
    completions: list[Completion]

    @property
    def tokens(self) -> int:
        return sum(len(completion.output_ids) for completion in self.completions)


class Way(NamedTuple):
    """One of the ways that are timed; a trainer's, whose answers are what its steps sample, too.

    gamma: proposals a round. sizes: rows of the batches that warm it up.
    """

    answer: Callable[[PromptIds, int], Chunk]  # prompts, and the number of the first of them
    gamma: int = 0
    sizes: Sequence[int] = ()


@dataclass(frozen=True)
class Timed:
    """All chunks of prompts by one way. Its rates are tokens per second, by chunk.

    documents: what each prompt belongs to, those that were not timed included; empty where each is
    a document of its own. What is one observation of time is a document where rows are decoded
    alone, else a batch. gamma: proposals a round. hybrid: of a hybrid, its other settings.
    """

    chunks: list[Chunk] = field(default_factory=list)
    documents: Sequence[Hashable] = ()
    gamma: int = 0
    hybrid: Mapping[str, int] = field(default_factory=dict)

    @property
    def completions(self) -> list[Completion]:
        return [completion for chunk in self.chunks for completion in chunk.completions]

    @property
    def prefill_seconds(self) -> float:
        return sum(chunk.prefill_seconds for chunk in self.chunks)

    def of_prompts(self, pairs: Iterable[tuple[float, float]]) -> Rate:
        """Sums and counts of every prompt as a rate, whose errors are those of documents."""
        return Rate.of(pairs, self.documents[: len(self.completions)])

    @property
    def rounds(self) -> Rate:
        """Without the prefill."""
        return Rate.of(((chunk.tokens, chunk.seconds) for chunk in self.chunks), self._units)

    @property
    def answers(self) -> Rate:
        """From request to last token: with the prefill, and with waiting for the slowest row."""
        seconds = ((one.tokens, one.prefill_seconds + one.seconds) for one in self.chunks)
        return Rate.of(seconds, self._units)

    @property
    def tokens_a_round(self) -> float:
        """What a round of the decoder yields, the length limit not applied: of one row, tau.

        Rows of a batch end apart, the drafted ones further apart, and its rounds go on with fewer.
        """
        emitted = sum(one.accepted + one.rounds for one in self.completions)
        longest = (max(one.rounds for one in chunk.completions) for chunk in self.chunks)
        return emitted / sum(longest)

    @property
    def _units(self) -> Sequence[Hashable]:
        together = any(len(chunk.completions) > 1 for chunk in self.chunks)
        return () if together else self.documents[: len(self.chunks)]


def now() -> float:
    """Seconds of a clock that stands still while units compile."""
    return time.perf_counter() - compile_seconds()


def synchronised_clock(device: torch.device) -> Callable[[], float]:
    """`now`, after all that the device still has to do."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now()

    return clock


def row_capacity(prompts: PromptIds, *, max_new_tokens: int, gamma: int) -> int:
    """Cache slots that hold each of `prompts` and its answer, up to `gamma` and for its costs.

    gamma: the nodes of a tree, where one is proposed.
    """
    return max(map(len, prompts)) + max_new_tokens + 2 * (max(gamma, MOST_GAMMA) + 1)


def code_sizes(target: Adapter, setting: Setting) -> Sequence[int] | None:
    """Batch sizes with code of their own, as `batch_size` takes them.

    On a CPU a graph takes up to half a minute, so there is one: rows that have ended run along.
    """
    return () if setting.compiled and target.device.type == "cpu" else None


def make_decoder(target: Adapter, proposer: Proposer | None, setting: Setting) -> Decoder:
    """A decoder of `setting.batch_size` rows with `proposer` attached."""
    decoder = Decoder(
        target,
        slots=setting.batch_size,
        capacity=setting.capacity,
        eos_token_ids=setting.eos_token_ids,
        verification=setting.verification,
        epsilon=setting.epsilon,
        compiled=setting.compiled,
        captured=setting.captured,
        batch_sizes=code_sizes(target, setting),
    )
    if proposer is not None:
        decoder.attach(DRAFT_ID, proposer)
    return decoder


def timed_batch(
    decoder: Decoder,
    prompts: PromptIds,
    setting: Setting,
    *,
    gamma: int,
    first: int,
    most: float = math.inf,
    **changes: Any,
) -> tuple[Chunk, list[RoundSeconds]]:
    """What it took to answer `prompts`, or `most` rounds of it, and what each round took by part.

    Timed from the request to the moment the last token has been read. first: number of the first
    prompt. changes: other settings of each request.
    """
    requests = make_requests(
        prompts,
        max_new_tokens=setting.max_new_tokens,
        sampling=setting.sampling,
        gamma=gamma,
        seed=setting.seed,
        first_row=first,
    )
    clock = synchronised_clock(decoder.target.device)
    started = clock()
    slots = decoder.join([replace(request, **changes) for request in requests])
    while decoder.prefill():
        pass
    ready = clock()
    running = {slot: Completion(list(p)) for slot, p in zip(slots, prompts, strict=True)}
    left, rounds = set(running), list[RoundSeconds]()
    while left and len(rounds) < most:
        for result in decoder.round():
            left -= set(record(running, result))
            rounds.append(result.seconds)
    finished = now()  # before a round that the device may go on with
    decoder.leave([*running])
    return Chunk(ready - started, finished - ready, [*running.values()]), rounds


def decoding(decoder: Decoder, setting: Setting, gamma: int = 0) -> Way:
    """Our decoder, of `setting`, with so many proposals a round: with 0 plain."""

    def answer(prompts: PromptIds, first: int) -> Chunk:
        return timed_batch(decoder, prompts, setting, gamma=gamma, first=first)[0]

    rows = setting.batch_size
    sizes = {rows}
    if gamma > 0 and (setting.compiled or setting.captured):
        # Drafted rows do not end together: one size for each code that a batch may shrink to.
        known = code_sizes(decoder.target, setting)
        sizes = {batch_size(left, rows, known) for left in range(1, rows + 1)}
    return Way(answer, gamma, sorted(sizes))


def time_ways(
    ways: Mapping[str, Way],
    prompts: PromptIds,
    warmup: PromptIds,
    *,
    batch_size: int = 1,
    documents: Sequence[Hashable] = (),
    minutes: float = math.inf,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Timed]:
    """Time every way on each batch of `prompts`, in rotating order, warmed up on `warmup`.

    Whatever has to be compiled is compiled then. Timing ends with the prompts, or behind so many
    `minutes`, which is said. documents: what each prompt belongs to.
    """
    for way in ways.values():
        for rows in way.sizes:
            way.answer((list(warmup) * rows)[:rows], 0)
    timed = {name: Timed(documents=documents, gamma=way.gamma) for name, way in ways.items()}
    started, names = now(), [*ways]
    for first in range(0, len(prompts), batch_size):
        if now() - started > 60 * minutes:
            note(f"timed {first} prompts in {minutes:g} min (evaluate.timing_minutes)")
            break
        batch = prompts[first : first + batch_size]
        for name in names:
            timed[name].chunks.append(ways[name].answer(batch, first))
        names = names[1:] + names[:1]  # so that none always goes first
    return timed
