"""What a round costs by part: c, v and o of the speed-up formula, measured.

On other prompts than the timed ones, so that the theory predicts from these costs and never from
the generations that it predicts. All are ratios to a plain step of the same moment: what disturbs
a machine for a while disturbs both.
"""

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftkit.decoding.generation import Completion, make_requests, record
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer, TextProposer
from draftkit.decoding.results import RoundSeconds
from draftkit.decoding.state import RoundView
from draftkit.evaluation.walltime import (
    PLAIN,
    PromptIds,
    Setting,
    make_decoder,
    rotated,
    synchronised_clock,
)
from draftkit.models.adapter import Adapter
from draftkit.theory.speedup import Costs

OVERHEAD_GAMMA = 2
WARM_TURNS = 1
CALIBRATION_TURNS = 16
BURST = 6  # rounds of a kind in a row
SETTLING = 2  # of them, until the caches of the processor hold what that kind reads


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
    as in the generations that are timed, so that they share it.
    """

    def __init__(
        self,
        target: Adapter,
        proposer: Proposer | None,
        prompts: PromptIds,
        setting: Setting,
        gamma: int,
    ) -> None:
        room = setting.capacity - max(map(len, prompts)) - 2 * (gamma + 1)
        self.setting = replace(setting, max_new_tokens=min(setting.max_new_tokens, room))
        self.clock = synchronised_clock(target.device)
        self.decoder = make_decoder(target, proposer, self.setting, clock=self.clock)
        self.prompts = prompts
        self.gamma = gamma
        self._joined = 0
        self._running: dict[int, Completion] = {}

    def turn(self) -> RoundSeconds:
        """Medians over a burst of rounds, as they follow each other in a generation."""
        rounds = [self.round() for _ in range(BURST)][SETTLING:]
        return RoundSeconds(*(statistics.median(column) for column in zip(*rounds, strict=True)))

    def round(self) -> RoundSeconds:
        """Seconds of one round; `rest` is all that is neither proposing nor verifying."""
        if not self._running:
            self._join()
        started = self.clock()
        (result,) = self.decoder.round()
        record(self._running, result)
        whole = self.clock() - started
        if any(result.done):
            self.decoder.leave([*self._running])
            self._running = {}
        propose, verify, _ = result.seconds
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


def calibrate(
    target: Adapter,
    draft: Adapter,
    prompts: PromptIds,
    setting: Setting,
    *,
    gammas: Sequence[int] = (),
) -> Calibration:
    """Measure c, v and o on `prompts`, which must not be the timed ones.

    Bursts of rounds of every kind take turns, and each is compared with the plain steps of its
    turn; medians over turns. v is measured at `setting.gamma` and at the other `gammas`, where a
    constant guess stands in for the draft. So it does for o, at gamma 2 and without compiled code,
    since o is what the host does between the units. `setting.capacity` must hold `gammas` too.
    """
    gamma = max(setting.gamma, 1)
    guess = TextProposer(FirstToken(target.vocab_size))
    flows = {
        PLAIN: Flow(target, None, prompts, setting, 0),
        "draft": Flow(target, DraftModelProposer(draft), prompts, setting, gamma),
        "rest": Flow(target, guess, prompts, replace(setting, compiled=False), OVERHEAD_GAMMA),
    }
    others = {g: f"verify {g}" for g in gammas if g not in (0, gamma)}
    flows |= {name: Flow(target, guess, prompts, setting, g) for g, name in others.items()}
    parts: dict[str, list[RoundSeconds]] = {name: [] for name in flows}
    for turn in range(WARM_TURNS + CALIBRATION_TURNS):
        for name in rotated(list(flows), turn):
            parts[name].append(flows[name].turn())
    kept = {name: turns[WARM_TURNS:] for name, turns in parts.items()}
    steps = [sum(seconds) for seconds in kept[PLAIN]]

    def ratios(name: str, part: str) -> list[float]:
        return [getattr(r, part) / step for r, step in zip(kept[name], steps, strict=True)]

    columns = {
        "plain_seconds": steps,
        "cost_ratio": [ratio / gamma for ratio in ratios("draft", "propose")],
        "verify_ratio": ratios("draft", "verify"),
        "overhead_ratio": ratios("rest", "rest"),
    }
    medians = {name: statistics.median(column) for name, column in columns.items()}
    verify_ratios = {g: statistics.median(ratios(name, "verify")) for g, name in others.items()}
    verify_ratios[0] = statistics.median(ratios(PLAIN, "verify"))
    verify_ratios[gamma] = medians["verify_ratio"]
    quartiles = {name: _quartiles(column) for name, column in columns.items()}
    return Calibration(Costs(**medians, verify_ratios=verify_ratios), quartiles)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
