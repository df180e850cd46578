"""Wall time: what speculation buys, measured beside its baseline.

The same prompts are decoded by every method, in turns, in one process, after a warm-up. Tokens
are counted the same way (cut at the end of text and at the length limit), and the prefill is kept
apart from the rounds. Compiling takes no time here: the clock stands still, and
`graphs.compile_seconds` tells for how long. What a round consists of: `costs`.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, Completion, make_requests, record
from draftkit.decoding.graphs import batch_size, compile_seconds
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.intervals import speedup
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import Rate

PLAIN = "plain"
CALIBRATED_GAMMAS = (1, 4, 8, 12)  # at which `costs` are measured beside the one in use
MOST_GAMMA = CALIBRATED_GAMMAS[-1]
FIRST_LOOK = 24  # prompts, behind which timing looks whether it has enough; then at twice as many
HALF_WIDTH = 0.05  # of the interval of the best speed-up, relative: enough
# Outside of that interval on either side, of one look. Who stops where an interval happens to be
# narrow stops where errors are estimated too small: with all looks it holds the truth in 95 of 100.
LOOK_TAIL, ONLY_TAIL = 0.016, 0.025  # the other where fewer prompts are timed, at no look

PromptIds = Sequence[Sequence[int]]
T = TypeVar("T")


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


class FullBatch(NamedTuple):
    """The rounds of a chunk up to the one in which its first row ends: all rows take part in them.

    Of such rounds the speed-up formula speaks. Behind them rows wait for the slowest.
    """

    seconds: float
    tokens: int  # of the answers
    row_rounds: int  # rounds times rows
    emitted: int  # tokens that the target passes yielded, the length limit not applied


class Chunk(NamedTuple):
    """What it took to answer a batch of prompts, and the answers."""

    prefill_seconds: float
    seconds: float  # after the prefill
    completions: list[Completion]
    full: FullBatch | None = None  # where rounds can be told apart

    @property
    def tokens(self) -> int:
        return sum(len(completion.output_ids) for completion in self.completions)


Method = Callable[[PromptIds, int], Chunk]  # prompts, and the number of the first of them


@dataclass(frozen=True)
class Timed:
    """All chunks of prompts by one method. Its rates are tokens per second, by chunk.

    documents: what each prompt belongs to, those that were not timed included; empty where each is
    a document of its own. What is one observation of time is a document where rows are decoded
    alone, else a batch. gamma: proposals a round.
    """

    chunks: list[Chunk] = field(default_factory=list)
    documents: Sequence[Hashable] = ()
    gamma: int = 0

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
    def tail(self) -> float:
        """What the interval of the speed-up leaves out on either side."""
        return ONLY_TAIL if len(self.completions) < FIRST_LOOK else LOOK_TAIL

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
    def full_batches(self) -> Rate:
        """What the formula predicts.

        In a larger batch rows end apart, the drafted ones further apart, so that whole chunks gain
        less than a server that refills its batch.
        """
        return Rate.of((full.tokens, full.seconds) for full in self._full)

    @property
    def full_length(self) -> float:
        """Acceptance length in the rounds of full batches."""
        return Rate.of((full.emitted, full.row_rounds) for full in self._full).mean

    @property
    def batched(self) -> bool:
        """Whether rows were decoded together."""
        return any(len(chunk.completions) > 1 for chunk in self.chunks)

    @property
    def _units(self) -> Sequence[Hashable]:
        return () if self.batched else self.documents[: len(self.chunks)]

    @property
    def _full(self) -> list[FullBatch]:
        return [chunk.full for chunk in self.chunks if chunk.full is not None]


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


class Mark(NamedTuple):
    """A moment in a device's own work; the difference of two is seconds."""

    event: torch.cuda.Event

    def __sub__(self, other: "Mark") -> float:
        """Seconds from `other` to this one; both must have come to pass."""
        return other.event.elapsed_time(self.event) / 1e3


def device_clock(device: torch.device) -> Callable[[], Mark]:
    """A clock that makes nobody wait: it marks the moment when a CUDA `device` gets here."""

    def clock() -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return Mark(event)

    return clock


def row_capacity(prompts: PromptIds, *, max_new_tokens: int, gamma: int) -> int:
    """Cache slots that hold each of `prompts` and its answer, up to `gamma` and for its costs.

    gamma: the nodes of a tree, where one is proposed.
    """
    return max(map(len, prompts)) + max_new_tokens + 2 * (max(gamma, MOST_GAMMA) + 1)


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
    )
    if proposer is not None:
        decoder.attach(DRAFT_ID, proposer)
    return decoder


def join(
    decoder: Decoder,
    prompts: PromptIds,
    setting: Setting,
    *,
    gamma: int,
    first: int,
    **changes: Any,
) -> dict[int, Completion]:
    """Prefill `prompts`, rows from number `first` on; their completions, still empty, by slot.

    changes: other settings of each request.
    """
    requests = make_requests(
        prompts,
        max_new_tokens=setting.max_new_tokens,
        sampling=setting.sampling,
        gamma=gamma,
        seed=setting.seed,
        first_row=first,
    )
    slots = decoder.join([replace(request, **changes) for request in requests])
    while decoder.prefill():
        pass
    return {slot: Completion(list(p)) for slot, p in zip(slots, prompts, strict=True)}


def decoding(target: Adapter, proposer: Proposer | None, setting: Setting) -> Method:
    """Our decoder as a method: plain without `proposer`.

    Timed from the request to the moment the last token has been read.
    """
    decoder = make_decoder(target, proposer, setting)
    gamma = 0 if proposer is None else setting.gamma
    clock = synchronised_clock(target.device)

    def generate(prompts: PromptIds, first: int) -> Chunk:
        started = clock()
        running = join(decoder, prompts, setting, gamma=gamma, first=first)
        ready = clock()
        left, full, row_rounds, emitted = set(running), None, 0, 0
        while left:
            for result in decoder.round():
                left -= set(record(running, result))
                row_rounds += len(result.slots)
                emitted += sum(result.emitted)
            if full is None and len(left) < len(running):
                tokens = sum(len(completion.output_ids) for completion in running.values())
                full = FullBatch(now() - ready, tokens, row_rounds, emitted)
        finished = now()  # before a round that the device may go on with
        decoder.leave([*running])
        return Chunk(ready - started, finished - ready, [*running.values()], full)

    return generate


def shapes(setting: Setting) -> list[int]:
    """Numbers of rows that stand for all that a batch may shrink to: one for each compiled code."""
    rows = setting.batch_size
    if not (setting.compiled or setting.captured):
        return [rows]
    return sorted({batch_size(left, rows) for left in range(1, rows + 1)})


def warm_up(
    methods: dict[str, Method], prompts: PromptIds, setting: Setting, *, drafted: Sequence[str]
) -> None:
    """Run every method once; whatever has to be compiled is compiled.

    The methods `drafted` run in every shape, since their rows do not end together.
    """
    for name, method in methods.items():
        for rows in shapes(setting) if name in drafted else [setting.batch_size]:
            method((list(prompts) * rows)[:rows], 0)


def take_turns(
    methods: dict[str, Method],
    prompts: PromptIds,
    setting: Setting,
    before: Callable[[int, int], None] = lambda chunk, chunks: None,
    enough: Callable[[Mapping[str, Timed]], bool] = lambda timed: False,
    documents: Sequence[Hashable] = (),
) -> dict[str, Timed]:
    """Time every method on each chunk of `prompts`, in rotating order, until it is `enough`.

    `before` gets the number of every chunk that comes, and of all: what it does is not timed.
    documents: what each prompt belongs to.
    """
    timed = {name: Timed(documents=documents) for name in methods}
    starts = range(0, len(prompts), setting.batch_size)
    for turn, first in enumerate(starts):
        before(turn, len(starts))
        chunk = prompts[first : first + setting.batch_size]
        for name in rotated(list(methods), turn):
            timed[name].chunks.append(methods[name](chunk, first))
        if enough(timed):
            break
    return timed


def until_certain(
    seconds: float, note: Callable[[str], None]
) -> Callable[[Mapping[str, Timed]], bool]:
    """Whether timing has seen enough prompts, asked behind each chunk.

    It looks at 24 prompts, at twice as many and so on. Enough is a half-width of `HALF_WIDTH` of
    the fastest way's interval end to end (`LOOK_TAIL`): the width and never the speed-up itself.
    So is the limit of `seconds` since it was asked first, which is said.
    """
    started, look = math.inf, FIRST_LOOK

    def enough(timed: Mapping[str, Timed]) -> bool:
        nonlocal started, look
        started, count = min(started, now()), len(timed[PLAIN].completions)
        if now() - started > seconds:
            note(f"timed {count} prompts in {seconds / 60:g} minutes (evaluate.timing_minutes)")
            return True
        if count < look:
            return False
        look *= 2
        answers = {name: one.answers for name, one in timed.items()}
        plain = answers.pop(PLAIN)
        speedups = [speedup(one, plain, tail=LOOK_TAIL) for one in answers.values()]
        best = max(speedups, key=lambda one: one.mean)
        return best.high - best.low <= 2 * HALF_WIDTH * best.mean

    return enough


def rotated(items: list[T], turn: int) -> list[T]:
    """`items` from another one on in every turn, so that none always goes first."""
    shift = turn % len(items)
    return items[shift:] + items[:shift]


def time_methods(
    target: Adapter,
    proposers: Mapping[str, Proposer],
    prompts: PromptIds,
    warmup: PromptIds,
    setting: Setting,
    *,
    gammas: Mapping[str, int] | None = None,
    **turns: Any,
) -> dict[str, Timed]:
    """Time plain decoding and every proposer on `prompts`, in turns, warmed up on `warmup`.

    gammas: of each proposer, where it is not `setting.gamma`. turns: as `take_turns` takes them.
    """
    gammas = {PLAIN: 0, **dict.fromkeys(proposers, setting.gamma), **(gammas or {})}
    methods = {PLAIN: decoding(target, None, setting)}
    for name, one in proposers.items():
        methods[name] = decoding(target, one, replace(setting, gamma=gammas[name]))
    warm_up(methods, warmup, setting, drafted=list(proposers))
    timed = take_turns(methods, prompts, setting, **turns)
    return {name: replace(one, gamma=gammas[name]) for name, one in timed.items()}
