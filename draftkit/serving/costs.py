"""What rounds cost on the decoder that will serve, and the gamma chosen by that.

A few rounds of made-up text at some batch sizes and numbers of proposals, before the first job.
They also make the code and the buffers that the first jobs need: seconds of work where code is
eager or captured, and where it is compiled as long as that takes for each of them. The choice
itself is `decoding.gamma`'s. Knows no texts and no jobs.
"""

import statistics
from collections.abc import Sequence

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import AdaptiveGamma, GammaPolicy
from draftkit.decoding.results import RoundSeconds
from draftkit.decoding.state import Request
from draftkit.evaluation.walltime import synchronised_clock
from draftkit.theory.speedup import Costs

TURNS = 3  # in which each kind is timed, so that what disturbs the machine disturbs all,
ROUNDS = 3  # for so many rounds,
WARM = 1  # after one that does not count
PROMPT_TOKENS = 8


class SteppedGamma:
    """A policy that keeps to few numbers, since each is compiled code of its own."""

    def __init__(self, policy: GammaPolicy, steps: Sequence[int]) -> None:
        self._policy = policy
        self._steps = sorted({0, *steps})

    def choose(self, *, batch: int, most: int) -> int:
        """The largest step that is no more than the policy's choice."""
        wished = self._policy.choose(batch=batch, most=most)
        return max(step for step in self._steps if step <= wished)

    def observe(self, *, gamma: int, accepted: Sequence[int]) -> None:
        """Tell the policy."""
        self._policy.observe(gamma=gamma, accepted=accepted)


def measured_policy(decoder: Decoder, proposer_id: str, gamma: int) -> GammaPolicy:
    """A policy up to `gamma` by the measured costs of an idle `decoder` and one of its drafters."""
    steps = sorted({0, 1, gamma // 2, gamma})
    costs = {size: measure(decoder, proposer_id, size, steps) for size in sizes(decoder)}
    return SteppedGamma(AdaptiveGamma(costs), steps)


def sizes(decoder: Decoder) -> list[int]:
    """Batch sizes worth telling apart: 1, a quarter of the slots, and all of them."""
    slots = decoder.free_slots
    return sorted({1, max(1, slots // 4), slots})


def measure(decoder: Decoder, proposer_id: str, size: int, gammas: Sequence[int]) -> Costs:
    """The costs of rounds of `size` rows with each of `gammas`, which hold 0 and a larger one."""
    timed: dict[int, list[RoundSeconds]] = {gamma: [] for gamma in gammas}
    for _ in range(TURNS):
        for gamma, found in timed.items():
            found += _rounds(decoder, proposer_id, size, gamma)
    seconds = {
        gamma: RoundSeconds(*(statistics.median(column) for column in zip(*found, strict=True)))
        for gamma, found in timed.items()
    }
    gamma = max(gammas)
    plain = sum(seconds[0])
    verify_ratios = {g: found.verify / plain for g, found in seconds.items()}
    return Costs(
        plain_seconds=plain,
        cost_ratio=seconds[gamma].propose / (gamma * plain),
        verify_ratio=verify_ratios[gamma],
        overhead_ratio=seconds[gamma].rest / plain,
        verify_ratios=verify_ratios,
    )


def _rounds(decoder: Decoder, proposer_id: str, size: int, gamma: int) -> list[RoundSeconds]:
    """A few rounds of `size` rows, at least one."""
    room = decoder.capacity - 2 * (gamma + 1)
    prompt = min(PROMPT_TOKENS, room - 1)
    requests = [
        Request(
            prompt_ids=[token % decoder.target.vocab_size for token in range(prompt)],
            max_new_tokens=min((WARM + ROUNDS) * (gamma + 1), room - prompt),
            sampling=SamplingConfig(),
            gamma=gamma,
            proposer_id=proposer_id,
            row=row,
        )
        for row in range(size)
    ]
    late, decoder.late = decoder.late, False
    decoder.clock = synchronised_clock(decoder.target.device)
    slots = decoder.join(requests)
    try:
        while decoder.prefill():
            pass
        results = [result for _ in range(WARM + ROUNDS) for result in decoder.round()]
    finally:
        decoder.leave(slots)
        decoder.late, decoder.clock = late, None
    return [result.seconds for result in results[min(WARM, len(results) - 1) :]]
