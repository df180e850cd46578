"""How the tests judge that a rule of decoding keeps the target's law: exactly, and in samples.

A law is a function from histories [N, L] to the distribution of the next token [N, V], so that
tables, penalties and models are all judged alike. Two instruments:

`measure_round` takes a verification rule as a black box and measures its law without randomness.
It finds by bisection where each acceptance uniform changes the outcome and where each next-token
uniform moves to another token, checks that nothing else matters inside the cells so found, and
returns the probability of every outcome. `check_round` assembles the joint law of the committed
tokens, continued by the target, and compares it with the target's own.

`decode` runs rounds with real noise, and `check_sample` compares positions and pairs of positions
with their exact laws by chi-square tests under one Bonferroni level.

A check raises LawBroken; everything here computes in float64 unless given something else.
Shapes: N histories or rows, R blocks, K proposals, C = 2^K combinations of tests, V vocabulary.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from draftkit.theory import noise
from draftkit.theory.verification import Verification, Verifier
from draftkit.theory.warping import SamplingParams, warp

Law = Callable[[Tensor], Tensor]
Draw = Callable[..., Tensor]  # the signature of noise.uniform
START = (0, 0)  # the tokens before the first: laws may look at the last two
LARGEST = 1 - 2.0**-52  # the largest uniform that noise.py makes


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
    """Everything that one round can do: per proposed block and combination of tests."""

    blocks: Tensor  # [R, K]
    mass: Tensor  # [R, C] probability
    accepted: Tensor  # [R, C]
    next_law: Tensor  # [R, C, V]

    def expected_accepted(self) -> float:
        """E[n], exactly."""
        return float((self.mass * self.accepted).sum())


def _bisect(is_past: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Where each monotone `is_past` turns true on [0, 1]: 0 if always, 1 if never."""
    low, high = torch.zeros_like(like), torch.ones_like(like)
    for _ in range(55):
        middle = (low + high) / 2
        past = is_past(middle)
        low, high = torch.where(past, low, middle), torch.where(past, middle, high)
    return high


Outcome = Callable[[Tensor, Tensor, Tensor], Verification]  # (block index, accept, next) uniforms


def _threshold(outcome: Outcome, rows: int, gamma: int, place: int) -> Tensor:
    """Where the acceptance uniform at `place` changes the number accepted: [R], 1 if nowhere.

    Tried with the other uniforms at every combination of their extremes: the places must agree.
    """
    every = list(itertools.product((0.0, LARGEST), repeat=gamma - 1))
    extremes = torch.tensor(every, dtype=torch.float64).reshape(len(every), gamma - 1)
    block = torch.arange(rows).repeat_interleave(len(extremes))
    others = extremes.repeat(rows, 1)
    blank = torch.zeros(len(block), dtype=torch.float64)

    def accepted_at(value: Tensor) -> Tensor:
        accept = torch.cat([others[:, :place], value[:, None], others[:, place:]], dim=1)
        return outcome(block, accept, blank).accepted

    at_zero = accepted_at(blank)
    changes = at_zero != accepted_at(blank + LARGEST)
    found = _bisect(lambda value: accepted_at(value) != at_zero, blank)
    found = torch.where(changes, found, torch.nan).view(rows, -1)
    lowest = found.nan_to_num(nan=2.0).amin(-1)
    highest = found.nan_to_num(nan=-1.0).amax(-1)
    if ((highest - lowest) > 1e-12).any():
        raise LawBroken(f"test {place + 1} depends on the noise of other tests")
    return torch.where(highest >= 0, highest, 1.0)


def _next_law(outcome: Outcome, block: Tensor, accept: Tensor, vocab_size: int) -> Tensor:
    """The length of the interval of next-token uniforms that gives each token: [cells, V]."""
    cell = torch.arange(len(block)).repeat_interleave(vocab_size - 1)
    token = torch.arange(vocab_size - 1).repeat(len(block))
    bounds = _bisect(
        lambda value: outcome(block[cell], accept[cell], value).next_token > token,
        torch.zeros(len(cell), dtype=torch.float64),
    ).view(len(block), vocab_size - 1)
    zero, one = torch.zeros_like(bounds[:, :1]), torch.ones_like(bounds[:, :1])
    return torch.cat([zero, bounds, one], dim=1).diff(dim=-1)


def _check_cells(
    outcome: Outcome,
    *,
    edge: Tensor,
    flags: Tensor,
    mass: Tensor,
    accepted: Tensor,
    next_law: Tensor,
) -> None:
    """Inside a cell nothing else may matter: other points give the same number and tokens."""
    rows, combinations, vocab_size = next_law.shape
    generator = torch.Generator().manual_seed(0)
    upper = next_law.cumsum(-1)
    middle = upper - next_law / 2  # inside the interval of each token
    for _ in range(4):
        shape = (rows, combinations, flags.shape[1])
        inside = torch.rand(shape, generator=generator, dtype=torch.float64)
        accept = torch.where(flags, edge * inside, edge + (LARGEST - edge) * inside)
        index = torch.arange(rows * combinations * vocab_size)
        cell = index // vocab_size
        result = outcome(
            cell // combinations, accept.flatten(0, 1)[cell], middle.reshape(-1).clamp(0, LARGEST)
        )
        real = (mass.reshape(-1)[cell] > 1e-12) & (next_law.reshape(-1) > 1e-9)
        if (real & (result.accepted != accepted.reshape(-1)[cell])).any():
            raise LawBroken("the number accepted depends on more than the tests")
        if (real & (result.next_token != index % vocab_size)).any():
            raise LawBroken("the next token depends on more than the tests and its own noise")


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

    def outcome(block: Tensor, accept_uniform: Tensor, next_uniform: Tensor) -> Verification:
        return verify(
            target_probs=target_probs[block],
            draft_probs=None if one_hot else draft_probs[block],
            draft_tokens=blocks[block],
            lengths=None if lengths is None else held[block],
            accept_uniform=accept_uniform,
            next_uniform=next_uniform,
        )

    thresholds = [_threshold(outcome, len(blocks), gamma, place) for place in range(gamma)]
    edge = torch.stack(thresholds, dim=1)[:, None]  # [R, 1, K]
    flags = torch.tensor(list(itertools.product((True, False), repeat=gamma)))  # [C, K]
    mass = torch.where(flags, edge, 1 - edge).prod(-1) * proposal.prod(-1)[:, None]  # [R, C]
    accept = torch.where(flags, edge / 2, (edge + LARGEST) / 2).flatten(0, 1)  # [R C, K]
    block = torch.arange(len(blocks)).repeat_interleave(len(flags))
    accepted = outcome(block, accept, torch.zeros_like(accept[:, 0])).accepted.view(mass.shape)
    next_law = _next_law(outcome, block, accept, vocab_size).view(*mass.shape, vocab_size)
    _check_cells(
        outcome,
        edge=edge,
        flags=flags,
        mass=mass,
        accepted=accepted,
        next_law=next_law,
    )
    return Round(blocks, mass, accepted, next_law)


def committed_law(measured: Round, target: Law) -> tuple[Tensor, Tensor]:
    """The joint law of K + 1 tokens, committed by the round and continued by the target.

    Returns it with the target's own, both [V^(K + 1)].
    """
    vocab_size, gamma = measured.next_law.shape[-1], measured.blocks.shape[1]
    own = likelihoods(target, sequences(vocab_size, gamma + 1))  # [V^(K + 1), K + 1]
    law = torch.zeros(len(own), dtype=torch.float64)
    for count in range(gamma + 1):
        place = vocab_size ** torch.arange(count - 1, -1, -1)
        prefix = (measured.blocks[:, :count] * place).sum(-1)  # [R] index of the accepted tokens
        mass = torch.where(measured.accepted == count, measured.mass, 0.0)[..., None]
        committed = torch.zeros(vocab_size**count, vocab_size, dtype=torch.float64)
        committed.index_add_(0, prefix, (mass * measured.next_law).sum(1))
        tail = vocab_size ** (gamma - count)
        law += committed.flatten().repeat_interleave(tail) * own[:, count + 1 :].prod(-1)
    return law, own.prod(-1)


def check_round(
    verify: Verifier,
    *,
    target: Law,
    draft: Law,
    vocab_size: int,
    gamma: int,
    one_hot: bool = False,
    stated_draft: Law | None = None,
    lengths: Callable[[Tensor], Tensor] | None = None,
    tolerance: float = 1e-10,
) -> Round:
    """Raise LawBroken unless a round, continued by the target, has the target's joint law."""
    measured = measure_round(
        verify,
        target=target,
        draft=draft,
        vocab_size=vocab_size,
        gamma=gamma,
        one_hot=one_hot,
        stated_draft=stated_draft,
        lengths=lengths,
    )
    law, own = committed_law(measured, target)
    error = float((law - own).abs().max())
    if not error <= tolerance:
        raise LawBroken(f"joint law is off by {error:.3g} (tolerance {tolerance:.0e})")
    return measured


def decode(
    verify: Verifier,
    *,
    target: Tensor,
    draft: Tensor,
    rows: int,
    tokens: int,
    gamma: int,
    stated_draft: Tensor | None = None,
    draw: Draw = noise.uniform,
    seed: int = 0,
) -> Tensor:
    """Rounds of `verify` over tables [V, V, V] until every row has `tokens`: [rows, tokens].

    stated_draft: the table that the rule is told, where it is not the one sampled from (a bug).
    draw: where uniforms come from, with the signature of noise.uniform.
    """
    stated = draft if stated_draft is None else stated_draft
    history = torch.zeros(rows, tokens + gamma + 3, dtype=torch.int64)
    history[:, :2] = torch.tensor(START)
    length = torch.full((rows,), 2)
    alive = torch.arange(rows)
    while len(alive):
        at = length[alive]

        def draws(purpose: int, count: int, alive: Tensor = alive, at: Tensor = at) -> Tensor:
            seeds = torch.full_like(alive, seed)
            return draw(seed=seeds, row=alive, length=at, count=count, purpose=purpose)

        proposal_uniform = draws(noise.DRAFT, gamma)
        before, last = history[alive, at - 2], history[alive, at - 1]
        block, target_probs, draft_probs = [], [], []
        for i in range(gamma):
            target_probs.append(target[before, last])
            draft_probs.append(stated[before, last])
            token = noise.sample(probs=draft[before, last], uniform=proposal_uniform[:, i])
            block.append(token)
            before, last = last, token
        target_probs.append(target[before, last])
        draft_tokens = torch.stack(block, dim=1)
        result = verify(
            target_probs=torch.stack(target_probs, dim=1),
            draft_probs=torch.stack(draft_probs, dim=1),
            draft_tokens=draft_tokens,
            lengths=None,
            accept_uniform=draws(noise.ACCEPT, gamma),
            next_uniform=draws(noise.NEXT, 1)[:, 0],
        )
        # What lies beyond the next token is overwritten by later rounds.
        history[alive[:, None], at[:, None] + torch.arange(gamma)] = draft_tokens
        history[alive, at + result.accepted] = result.next_token
        length[alive] = at + result.accepted + 1
        alive = alive[length[alive] < tokens + 2]
    return history[:, 2 : tokens + 2]


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
