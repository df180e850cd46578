"""What a round costs by part: c, v and o of the speed-up formula, measured.

On other prompts than the timed ones, so that the theory predicts from these costs and never from
the generations that it predicts. All are ratios to a plain step of the same moment, and bursts of
rounds stand between the timed chunks: what disturbs a machine for a while disturbs all.
"""

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftkit.decoding.generation import Completion, make_requests, record
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer, TextProposer
from draftkit.decoding.results import RoundSeconds
from draftkit.decoding.state import RoundView
from draftkit.evaluation import walltime
from draftkit.evaluation.walltime import (
    PLAIN,
    PromptIds,
    Setting,
    device_clock,
    make_decoder,
    rotated,
    synchronised_clock,
)
from draftkit.models.adapter import Adapter
from draftkit.theory.speedup import Costs

OVERHEAD_GAMMA = 2
WARM_TURNS = 1
CALIBRATION_TURNS = 12
BURST = 16  # rounds of a kind in a row
# Of them, until the caches of the processor hold what that kind reads: a plain step that follows
# other work takes half as long again as one in a long answer, and the fourth still a sixth more.
SETTLING = 8


@dataclass(frozen=True)
class Calibration:
    """The measured costs and, for each, the quartiles over rounds."""

    costs: Costs
    quartiles: dict[str, tuple[float, float]]


class FirstToken:
    """The guess that always is token 0, under a flat q: verifying it costs what verifying costs."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @property
    def signature(self) -> Hashable:
        """Nothing but the vocabulary."""
        return (type(self), self.vocab_size)

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """Guess token 0, `gamma` times a row."""
        tokens = view.length[:, None].new_zeros(len(view.length), gamma)
        flat = None
        if not view.group.greedy:  # as a draft: where all rows are greedy its q is one-hot
            shape = (*tokens.shape, self.vocab_size)
            flat = torch.full(shape, 1 / self.vocab_size, device=tokens.device)
        return Proposal(tokens, flat, lengths=torch.full_like(view.length, gamma))

    def load(self, state_dict: dict[str, Tensor]) -> None:
        """Raise ValueError: there is nothing to load."""
        raise ValueError("a constant guess has no weights")


class Flow:
    """Full batches that are decoded on and on, one timed round at a time.

    As soon as a row ends, all make room for the next batch. Whatever compiled code depends on is
    as in the generations that are timed, so that they share it. So is who waits for whom: `late`
    (as on CUDA) a round lasts from one result to the next, and the device times its parts.
    """

    def __init__(
        self,
        target: Adapter,
        proposer: Proposer | None,
        prompts: PromptIds,
        setting: Setting,
        gamma: int,
        *,
        late: bool | None = None,
    ) -> None:
        room = setting.capacity - max(map(len, prompts)) - 2 * (gamma + 1)
        self.setting = replace(setting, max_new_tokens=min(setting.max_new_tokens, room))
        self.clock = synchronised_clock(target.device)
        on_cuda = target.device.type == "cuda"
        of_rounds = device_clock(target.device) if on_cuda else self.clock
        self.decoder = make_decoder(target, proposer, self.setting, clock=of_rounds)
        self.decoder.late = on_cuda if late is None else late
        self.prompts = prompts
        self.gamma = gamma
        self._joined = 0
        self._running: dict[int, Completion] = {}
        self._last: float | None = None  # when a round began or, late, the one before came back

    def turn(self) -> RoundSeconds:
        """Means over a burst of rounds, as they follow each other in a generation."""
        rounds = [self.round() for _ in range(BURST)][SETTLING:]
        return RoundSeconds(*(statistics.fmean(column) for column in zip(*rounds, strict=True)))

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
            self.decoder.leave([*self._running])
            self._running, self._last = {}, None
        propose, verify, _ = results[0].seconds
        return RoundSeconds(propose, verify, whole - propose - verify)

    def _join(self) -> None:
        setting, first = self.setting, self._joined
        rows = range(first, first + setting.batch_size)
        requests = make_requests(
            [self.prompts[row % len(self.prompts)] for row in rows],
            max_new_tokens=setting.max_new_tokens,
            sampling=setting.sampling,
            gamma=self.gamma,
            seed=setting.seed,
            first_row=first,
        )
        asked = list(requests)
        slots = self.decoder.join(asked)
        texts = (Completion(list(request.prompt_ids)) for request in asked)
        self._running = dict(zip(slots, texts, strict=True))
        self._joined += setting.batch_size
        while self.decoder.prefill():
            pass


class Calibrator:
    """Measures c, v and o on `prompts`, which must not be the timed ones.

    Bursts of rounds of every kind take turns, and each is compared with the plain steps of its
    turn; medians over turns. v is measured at `setting.gamma` and at the other `gammas`, where a
    constant guess stands in for the draft. So it does for o, at gamma 2 and without compiled code,
    since o is what the host does between the units; but as timed on CUDA, where the device is at
    work meanwhile. `setting.capacity` must hold `gammas` too.
    """

    def __init__(
        self,
        target: Adapter,
        draft: Adapter,
        prompts: PromptIds,
        setting: Setting,
        *,
        gammas: Sequence[int] = (),
    ) -> None:
        self._gamma = max(setting.gamma, 1)
        guess = TextProposer(FirstToken(target.vocab_size))
        on_cuda = target.device.type == "cuda"
        of_rest = setting if on_cuda else replace(setting, compiled=False, captured=False)
        self._flows = {
            PLAIN: Flow(target, None, prompts, setting, 0),
            "draft": Flow(target, DraftModelProposer(draft), prompts, setting, self._gamma),
            "rest": Flow(target, guess, prompts, of_rest, OVERHEAD_GAMMA),
        }
        self._others = {g: f"verify {g}" for g in gammas if g not in (0, self._gamma)}
        for g, name in self._others.items():
            self._flows[name] = Flow(target, guess, prompts, setting, g)
        self._turns: dict[str, list[RoundSeconds]] = {name: [] for name in self._flows}
        self._taken = 0

    def turn(self, count: int = 1) -> None:
        """Measure a burst of every kind, `count` times; the very first ones only warm up."""
        if self._taken == 0:
            self._take(WARM_TURNS, keep=False)
        self._take(count, keep=True)

    def _take(self, count: int, *, keep: bool) -> None:
        for turn in range(self._taken, self._taken + count):
            for name in rotated(list(self._flows), turn):
                seconds = self._flows[name].turn()
                if keep:
                    self._turns[name].append(seconds)
        self._taken += count

    def result(self) -> Calibration:
        """The costs by what has been measured so far, at least one turn."""
        steps = [sum(seconds) for seconds in self._turns[PLAIN]]

        def ratios(name: str, part: str) -> list[float]:
            turns = zip(self._turns[name], steps, strict=True)
            return [getattr(seconds, part) / step for seconds, step in turns]

        columns = {
            "plain_seconds": steps,
            "cost_ratio": [ratio / self._gamma for ratio in ratios("draft", "propose")],
            "verify_ratio": ratios("draft", "verify"),
            "overhead_ratio": ratios("rest", "rest"),
        }
        medians = {name: statistics.median(column) for name, column in columns.items()}
        verify_ratios = {
            gamma: statistics.median(ratios(name, "verify")) for gamma, name in self._others.items()
        }
        verify_ratios[0] = statistics.median(ratios(PLAIN, "verify"))
        verify_ratios[self._gamma] = medians["verify_ratio"]
        quartiles = {name: _quartiles(column) for name, column in columns.items()}
        return Calibration(Costs(**medians, verify_ratios=verify_ratios), quartiles)


def between(
    calibrators: Sequence[Calibrator], chunks: int, turns: int = CALIBRATION_TURNS
) -> Callable[[int], None]:
    """What stands before chunk i of so many: `turns` of each calibrator in all, evenly spread."""

    def before(chunk: int) -> None:
        first, end = (-(-number * turns // chunks) for number in (chunk, chunk + 1))
        for calibrator in calibrators:
            calibrator.turn(end - first)

    return before


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
