"""How the tests judge that a rule of decoding keeps the target's law: exactly, and in samples.

A law is a function from histories [N, L] to the distribution of the next token [N, V], so that
tables, penalties and models are all judged alike.

`measure_round` takes a verification rule as a black box and measures its law without randomness.
It finds by bisection where each uniform changes the outcome, checks that nothing else matters
inside the cells so found, and returns the probability of every outcome. `check_round` assembles
the joint law of the committed tokens, continued by the target, and compares it with the target's
own.

`check_sample` compares positions and pairs of positions of sampled texts with their exact laws by
chi-square tests under one Bonferroni level.

A check raises LawBroken; everything here computes in float64 unless given something else.
Shapes: N histories or rows, R blocks, K proposals, M cells of noise, V vocabulary.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from draftkit.theory.verification import Verifier
from draftkit.theory.warping import SamplingParams, warp
from tests.theory.boxes import boxes

Law = Callable[[Tensor], Tensor]
TOLERANCE = 1e-10  # of the joint law of a round
START = (0, 0)  # the tokens before the first: laws may look at the last two


class LawBroken(AssertionError):
    """The rule under test does not produce the law that it must."""


def markov(table: Tensor) -> Law:
    """The law that looks at the last two tokens: table is [V, V, V], the next token last."""
    return lambda history: table[history[:, -2], history[:, -1]]


def random_logits(vocab_size: int, seed: int, spread: float = 1.5) -> Tensor:
    """Reproducible logits [V, V, V] for `markov`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (vocab_size, vocab_size, vocab_size)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def warped_table(logits: Tensor, **sampling: float) -> Tensor:
    """A table of served probabilities from logits [V, V, V]."""
    return warp(logits, SamplingParams.uniform(len(logits), **sampling))


def sequences(vocab_size: int, length: int) -> Tensor:
    """All token sequences [V^length, length], the last token running fastest."""
    every = list(itertools.product(range(vocab_size), repeat=length))
    return torch.tensor(every, dtype=torch.int64).reshape(len(every), length)


def conditionals(law: Law, tokens: Tensor) -> Tensor:
    """The law before every token of [N, L] and after the last: [N, L + 1, V]."""
    history = torch.cat([torch.tensor(START).expand(len(tokens), 2), tokens], dim=1)
    return torch.stack([law(history[:, : i + 2]) for i in range(tokens.shape[1] + 1)], dim=1)


def likelihoods(law: Law, tokens: Tensor) -> Tensor:
    """The probability of every token of [N, L] given those before it: [N, L]."""
    return conditionals(law, tokens)[:, :-1].gather(-1, tokens[..., None])[..., 0]


@dataclass(frozen=True)
class Round:
    """Everything that one round can do: per cell of the noise of every proposed block."""

    blocks: Tensor  # [R, K]
    block: Tensor  # [M] which of them was proposed
    mass: Tensor  # [M] probability
    accepted: Tensor  # [M]
    next_token: Tensor  # [M]

    def expected_accepted(self) -> float:
        """E[n], exactly."""
        return float((self.mass * self.accepted).sum())

    def outcomes(self, vocab_size: int) -> Tensor:
        """The probability of every block, number accepted and next token: [R, K + 1, V]."""
        rows, gamma = self.blocks.shape
        law = torch.zeros(rows, gamma + 1, vocab_size, dtype=torch.float64)
        return law.index_put((self.block, self.accepted, self.next_token), self.mass, True)


def measure_round(
    verify: Verifier,
    *,
    target: Law,
    draft: Law,
    vocab_size: int,
    gamma: int,
    one_hot: bool = False,
    stated_draft: Law | None = None,
    lengths: Callable[[Tensor], Tensor] | None = None,
) -> Round:
    """The law of one round of `verify`, measured from outside.

    draft: what proposals are sampled from; stated_draft: what the rule is told instead (a bug).
    one_hot: the rule is told nothing. lengths: proposals of each block [R, K] to [R], which may
    look at drafted tokens only; beyond them lie leftovers: uniform tokens and the laws after them.
    """
    blocks = sequences(vocab_size, gamma)
    proposal = likelihoods(draft, blocks)
    target_probs = conditionals(target, blocks)
    draft_probs = conditionals(stated_draft or draft, blocks)[:, :gamma]
    held = torch.full((len(blocks),), gamma) if lengths is None else lengths(blocks)  # [R]
    is_proposed = torch.arange(gamma) < held[:, None]  # [R, K]
    proposal = torch.where(is_proposed, proposal, 1 / vocab_size)
    possible = proposal.prod(-1) > 0
    blocks, proposal, held = blocks[possible], proposal[possible], held[possible]
    target_probs, draft_probs = target_probs[possible], draft_probs[possible]

    def outcome(block: Tensor, uniforms: Tensor) -> Tensor:
        result = verify(
            target_probs=target_probs[block],
            draft_probs=None if one_hot else draft_probs[block],
            draft_tokens=blocks[block],
            lengths=None if lengths is None else held[block],
            accept_uniform=uniforms[:, :gamma],
            next_uniform=uniforms[:, gamma],
        )
        return result.accepted * vocab_size + result.next_token

    cells = boxes(outcome, len(blocks), gamma + 1)
    found = outcome(cells.state, cells.middle)
    real = ((cells.high - cells.low) > 1e-9).all(-1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        elsewhere = outcome(cells.state, cells.somewhere(generator, at_edges=False))
        if (real & (elsewhere != found)).any():
            raise LawBroken("the outcome of a round depends on more than its uniforms in turn")
    mass = cells.mass * proposal.prod(-1)[cells.state]
    return Round(blocks, cells.state, mass, found // vocab_size, found % vocab_size)


def committed_law(measured: Round, target: Law, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The joint law of K + 1 tokens, committed by the round and continued by the target.

    Returns it with the target's own, both [V^(K + 1)].
    """
    gamma = measured.blocks.shape[1]
    outcomes = measured.outcomes(vocab_size)
    own = likelihoods(target, sequences(vocab_size, gamma + 1))  # [V^(K + 1), K + 1]
    law = torch.zeros(len(own), dtype=torch.float64)
    for count in range(gamma + 1):
        place = vocab_size ** torch.arange(count - 1, -1, -1)
        prefix = (measured.blocks[:, :count] * place).sum(-1)  # [R] index of the accepted tokens
        committed = torch.zeros(vocab_size**count, vocab_size, dtype=torch.float64)
        committed.index_add_(0, prefix, outcomes[:, count])
        tail = vocab_size ** (gamma - count)
        law += committed.flatten().repeat_interleave(tail) * own[:, count + 1 :].prod(-1)
    return law, own.prod(-1)


def check_round(verify: Verifier, *, target: Law, vocab_size: int, **problem: Any) -> Round:
    """Raise LawBroken unless a round, continued by the target, has the target's joint law.

    problem: what else `measure_round` takes.
    """
    measured = measure_round(verify, target=target, vocab_size=vocab_size, **problem)
    law, own = committed_law(measured, target, vocab_size)
    error = float((law - own).abs().max())
    if not error <= TOLERANCE:
        raise LawBroken(f"joint law is off by {error:.3g} (tolerance {TOLERANCE:.0e})")
    return measured


def pair_laws(table: Tensor, tokens: int) -> dict[tuple[int, int], Tensor]:
    """The exact law of tokens (i, j) for neighbours and next neighbours: {(i, j): [V, V]}.

    (i, i) is the law of one position, [V].
    """
    joint = torch.zeros_like(table[0])
    joint[START] = 1.0  # of the last two tokens
    laws = {}
    for i in range(tokens):
        triple = joint[..., None] * table
        joint = triple.sum(0)
        laws[i, i] = joint.sum(0)
        if i >= 1:
            laws[i - 1, i] = joint
        if i >= 2:
            laws[i - 2, i] = triple.sum(1)
    return laws


def chi_square_p_value(observed: Tensor, law: Tensor) -> float:
    """The p-value of counts against a law, cells expecting fewer than 5 pooled; 0 if impossible."""
    observed, law = observed.flatten().double(), law.flatten().double()
    if observed[law == 0].sum() > 0:
        return 0.0
    expected = law * observed.sum()
    small = expected < 5
    observed = torch.cat([observed[~small], observed[small].sum(0, keepdim=True)])
    expected = torch.cat([expected[~small], expected[small].sum(0, keepdim=True)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1)) if len(expected) > 1 else 1.0


def check_sample(
    sample: Tensor, laws: dict[tuple[int, int], Tensor], level: float = 1e-3
) -> dict[tuple[int, int], float]:
    """Raise LawBroken if any position or pair of `sample` [N, T] departs from its law.

    One Bonferroni level over all tests; returns their p-values.
    """
    p_values = {}
    for (i, j), law in laws.items():
        vocab_size = law.shape[-1]
        index = sample[:, i] if i == j else sample[:, i] * vocab_size + sample[:, j]
        p_values[i, j] = chi_square_p_value(torch.bincount(index, minlength=law.numel()), law)
    worst = min(p_values, key=lambda pair: p_values[pair])
    if p_values[worst] < level / len(p_values):
        raise LawBroken(f"positions {worst}: chi-square p-value {p_values[worst]:.3g}")
    return p_values
