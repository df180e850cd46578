"""How many tokens to propose in the next round: a fixed number, or the one that pays best.

The theory's choice maximises the speed-up tau(alpha, gamma) / (gamma c + v(gamma) + o) over gamma,
0 included, with measured costs (Leviathan et al., arXiv 2211.17192, section 3; `theory.speedup`).
Costs depend on the batch size: a large one leaves no idle arithmetic to verify with.

Every choice is lossless: it depends only on rounds that are already committed, never on the
noise, the proposals or the target's pass of the round that it is made for. Given the past, a round
verifies a number of proposals that was fixed beforehand, and that is exact for each number. Only
the law is kept, not the sample: another schedule reads other noise.
"""

from collections.abc import Sequence

from draftkit.theory.speedup import Costs, best_gamma


class AdaptiveGamma:
    """The theory's best for a running estimate of alpha, and plain decoding where nothing pays.

    alpha is estimated by accepted / tests, the maximum likelihood of the i.i.d. model (a first
    rejection is a test, what follows it is none), over rounds weighted by decay^age and with
    Laplace's prior of one acceptance and one rejection. Under block verification, which does not
    test positions one by one, it is the alpha that would give the same counts.

    Plain rounds observe nothing but age the evidence. After `probe_after` of them gamma 1 is tried
    for one round; while such probes find no acceptance that would pay, the wait doubles up to
    `probe_at_most`. Nothing is tried where even alpha = 1 would not pay.
    costs: by batch size. steps: numbers to keep to beside 0, since each may be compiled code of its
    own (default: all). It measures nothing: rounds are reported to it.
    """

    decay = 0.98
    probe_after = 8
    probe_at_most = 128

    def __init__(self, costs: dict[int, Costs], *, steps: Sequence[int] | None = None) -> None:
        self.costs = costs
        self.steps = None if steps is None else sorted({0, *steps})
        self._accepted = 0.0  # decayed
        self._tests = 0.0  # decayed
        self._plain_rounds = 0  # since the last round that proposed
        self._wait = self.probe_after

    @property
    def alpha(self) -> float:
        """The present estimate; 1/2 before anything is observed."""
        return (self._accepted + 1) / (self._tests + 2)

    def choose(self, *, batch: int, most: int) -> int:
        """The number of tokens, 0..most, that each of `batch` rows proposes next. Changes nothing.

        0 is a plain step.
        """
        costs = costs_at(self.costs, batch)
        gamma, _ = best_gamma(self.alpha, costs, most)
        if gamma == 0 and self._plain_rounds >= self._wait and best_gamma(1.0, costs, most)[0] > 0:
            gamma = 1
        return gamma if self.steps is None else max(n for n in self.steps if n <= gamma)

    def observe(self, *, gamma: int, accepted: Sequence[int]) -> None:
        """Take in a finished round: proposals kept by each row that had `gamma` of them."""
        if gamma == 0:
            self._plain_rounds += 1
        elif accepted:
            passed = sum(accepted)
            tests = passed + sum(count < gamma for count in accepted)
            kept = self.decay ** (self._plain_rounds + 1)
            self._accepted = kept * self._accepted + passed
            self._tests = kept * self._tests + tests
            if self._plain_rounds >= self._wait:
                costs = costs_at(self.costs, len(accepted))
                best, _ = best_gamma(passed / tests, costs, max(costs.verify_ratios))
                wait = self.probe_after if best > 0 else 2 * self._wait
                self._wait = min(wait, self.probe_at_most)
            self._plain_rounds = 0


def costs_at(costs: dict[int, Costs], batch: int) -> Costs:
    """The costs of the smallest measured batch size that holds `batch` rows, else the largest."""
    return costs[min((size for size in costs if size >= batch), default=max(costs))]
