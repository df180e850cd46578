"""What a round costs by part: c, v and o of the speed-up formula, for evaluation and server.

Kinds of rounds take turns, in bursts, and each is compared with the plain steps of its turn: what
disturbs a machine for a while disturbs all. For an evaluation the bursts stand between the timed
chunks, on other prompts, so that the theory predicts from these costs and never from the
generations that it predicts. A server measures on the decoder that will serve, before the first
job, which also makes the code and the buffers that the first jobs need.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.generation import DRAFT_ID, Completion, record
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.results import RoundSeconds
from draftkit.evaluation import walltime
from draftkit.evaluation.walltime import (
    PromptIds,
    Setting,
    device_clock,
    join,
    make_decoder,
    rotated,
    synchronised_clock,
)
from draftkit.models.adapter import Adapter
from draftkit.theory.speedup import Costs

WARM_TURNS = 1
CALIBRATION_TURNS = 12
BURST = 16  # rounds of a kind in a row
# Rounds of a burst that do not count, until the caches of the processor hold what that kind reads:
# a plain step after other work takes 1.5 times one in a long answer, the fourth still 1.17 times.
SETTLING = 8
SERVER_TURNS, SERVER_BURST, SERVER_SETTLING = 3, 4, 1  # few: they delay the start of a server
SERVER_PROMPT_TOKENS = 8


class Flow:
    """Full batches that are decoded on and on, one timed round at a time, by an idle `decoder`.

    As soon as a row ends, all make room for the next batch. Whatever compiled code depends on is
    as in the generations that are timed, so that they share it. So is who waits for whom: `late`
    (as on CUDA) a round lasts from one result to the next, and the device times its parts.
    With `proposer_id` the decoder is a server's, which others share: rows leave after every burst.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: PromptIds,
        setting: Setting,
        gamma: int,
        *,
        proposer_id: str | None = None,
        late: bool | None = None,
    ) -> None:
        tree = decoder.tree(proposer_id or DRAFT_ID) if gamma else None
        scratch = max(gamma, tree.nodes) if tree else gamma
        room = setting.capacity - max(map(len, prompts)) - 2 * (scratch + 1)
        self.setting = replace(setting, max_new_tokens=min(setting.max_new_tokens, room))
        device = decoder.target.device
        self.clock = synchronised_clock(device)
        self.decoder = decoder
        on_cuda = device.type == "cuda"
        decoder.late = on_cuda and proposer_id is None if late is None else late
        decoder.clock = device_clock(device) if decoder.late and on_cuda else self.clock
        self.prompts = prompts
        self.gamma = gamma
        self._changes = {} if proposer_id is None else {"proposer_id": proposer_id}
        self._joined = 0
        self._running: dict[int, Completion] = {}
        self._last: float | None = None  # when a round began or, late, the one before came back

    def burst(self, rounds: int, settling: int) -> RoundSeconds:
        """Means over `rounds` in a row, as they follow each other, without the first `settling`."""
        seconds = [self.round() for _ in range(rounds)][settling:]
        if self._changes:
            self.leave()
        return RoundSeconds(*map(statistics.fmean, zip(*seconds, strict=True)))

    def round(self) -> RoundSeconds:
        """Seconds of one round; `rest` is all that is neither proposing nor verifying."""
        while True:
            if not self._running:
                self._join()
            if not self.decoder.late:
                self._last = self.clock()
            started, results = self._last, self.decoder.round()
            for result in results:
                record(self._running, result)
            self._last = walltime.now() if self.decoder.late else self.clock()
            if results and started is not None:
                break
        whole = self._last - started
        if any(results[0].done):
            self.leave()
        propose, verify, _ = results[0].seconds
        return RoundSeconds(propose, verify, whole - propose - verify)

    def leave(self) -> None:
        """Give the decoder its slots back."""
        self.decoder.leave([*self._running])
        self._running, self._last = {}, None

    def _join(self) -> None:
        first, self._joined = self._joined, self._joined + self.setting.batch_size
        prompts = [self.prompts[row % len(self.prompts)] for row in range(first, self._joined)]
        batch = (self.decoder, prompts, self.setting)
        self._running = join(*batch, gamma=self.gamma, first=first, **self._changes)


class Meter:
    """Measures c, v and o of rounds of `gamma` proposals, and c and v of rounds of others.

    All are ratios to the plain steps, those of gamma 0, of the same turn; medians over turns.
    """

    def __init__(self, flows: Mapping[int, Flow], gamma: int) -> None:
        self._flows = flows
        self._gamma = gamma
        self._turns: dict[int, list[RoundSeconds]] = {kind: [] for kind in flows}
        self._taken = 0

    def turn(self, count: int = 1) -> None:
        """Measure a burst of every kind, `count` times; the very first ones only warm up."""
        if self._taken == 0:
            self.take(WARM_TURNS, BURST, SETTLING)
            for seconds in self._turns.values():
                seconds.clear()
        self.take(count, BURST, SETTLING)

    def take(self, count: int, rounds: int, settling: int) -> None:
        """Measure `count` turns of bursts of so many rounds."""
        for turn in range(self._taken, self._taken + count):
            for kind in rotated(list(self._flows), turn):
                self._turns[kind].append(self._flows[kind].burst(rounds, settling))
        self._taken += count

    def costs(self, gamma: int | None = None) -> Costs:
        """The medians of what has been measured so far, at least one turn; c and v at `gamma`."""
        propose, verify = (
            {kind: self._ratio(kind, part) for kind in self._flows}
            for part in ("propose", "verify")
        )
        medians = Costs(
            plain_seconds=statistics.median(map(sum, self._turns[0])),
            cost_ratio=propose[self._gamma] / self._gamma,
            verify_ratio=verify[self._gamma],
            overhead_ratio=self._ratio(self._gamma, "rest"),
            verify_ratios=verify,
            draft_units={kind: unit for kind, unit in propose.items() if kind > 0},
        )
        return medians if gamma is None else medians.at(gamma)

    def _ratio(self, kind: int, part: str) -> float:
        turns = zip(self._turns[kind], self._turns[0], strict=True)
        return statistics.median(getattr(seconds, part) / sum(step) for seconds, step in turns)


def meter(
    target: Adapter,
    make: Callable[[], Proposer],
    prompts: PromptIds,
    setting: Setting,
    *,
    gammas: Sequence[int] = (),
) -> Meter:
    """A meter of the proposer that `make` makes, on `prompts` that must not be the timed ones.

    c and v are measured at `setting.gamma` and at the other `gammas`, which `setting.capacity` must
    hold too.
    """
    gamma = max(setting.gamma, 1)

    def flow(gamma: int) -> Flow:
        decoder = make_decoder(target, make() if gamma else None, setting)
        return Flow(decoder, prompts, setting, gamma)

    return Meter({one: flow(one) for one in dict.fromkeys((0, gamma, *gammas))}, gamma)


def between(meters: Sequence[Meter], turns: int = CALIBRATION_TURNS) -> Callable[[int, int], None]:
    """What stands before a chunk of so many: `turns` of each meter in all, evenly spread."""

    def before(chunk: int, chunks: int) -> None:
        first, end = (-(-number * turns // chunks) for number in (chunk, chunk + 1))
        for one in meters:
            one.turn(end - first)

    return before


def measured_policy(decoder: Decoder, proposer_id: str, gamma: int) -> AdaptiveGamma:
    """A policy up to `gamma` by the measured costs of an idle `decoder` and one of its proposers.

    At few gammas and batch sizes (one row, a quarter of the slots, all), since each may be compiled
    code of its own.
    """
    steps = sorted({0, 1, gamma // 2, gamma})
    sizes = sorted({1, max(1, decoder.free_slots // 4), decoder.free_slots})
    costs = {size: decoder_costs(decoder, proposer_id, size, steps) for size in sizes}
    return AdaptiveGamma(costs, steps=steps)


def decoder_costs(decoder: Decoder, proposer_id: str, size: int, gammas: Sequence[int]) -> Costs:
    """Costs of rounds of `size` rows with each of `gammas`, which hold 0 and a larger one."""
    most = max(gammas)
    tree = decoder.tree(proposer_id)
    scratch = max(most, tree.nodes) if tree else most
    length = min(SERVER_PROMPT_TOKENS, decoder.capacity - 2 * (scratch + 1) - 1)
    prompt = [token % decoder.target.vocab_size for token in range(length)]
    if (start := decoder.target.start_id) is not None:  # of what an encoder reads
        prompt = [*(token for token in prompt[1:] if token != start), start]
    setting = Setting(
        max_new_tokens=SERVER_BURST * (most + 1),
        gamma=most,
        verification=decoder.verification,
        epsilon=decoder.epsilon,
        batch_size=size,
        capacity=decoder.capacity,
    )
    kept = decoder.late, decoder.clock
    flows = {
        gamma: Flow(decoder, [prompt], setting, gamma, proposer_id=proposer_id) for gamma in gammas
    }
    try:
        measuring = Meter(flows, most)
        measuring.take(SERVER_TURNS, SERVER_BURST, SERVER_SETTLING)
        return measuring.costs()
    finally:
        for one in flows.values():
            one.leave()
        decoder.late, decoder.clock = kept
