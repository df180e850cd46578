"""How the tests judge that a rule of decoding keeps the target's law: exactly, and in samples.

A law is a function from histories [N, L] to the distribution of the next token [N, V], so that
tables, penalties and models are all judged alike. Two instruments:

`measure_round` takes a verification rule as a black box and measures its law without randomness.
It finds by bisection where each uniform changes the outcome, checks that nothing else matters
inside the cells so found, and returns the probability of every outcome. `check_round` assembles
the joint law of the committed tokens, continued by the target, and compares it with the target's
own.

`decode` runs rounds with real noise, and `check_sample` compares positions and pairs of positions
with their exact laws by chi-square tests under one Bonferroni level.

A check raises LawBroken; everything here computes in float64 unless given something else.
Shapes: N histories or rows, R blocks, K proposals, M places, C cells of noise, V vocabulary.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.theory import noise
from draftkit.theory.verification import Verifier
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
    """Everything that one round can do: per proposed block and cell of its noise."""

    blocks: Tensor  # [R, K]
    mass: Tensor  # [R, C] probability
    accepted: Tensor  # [R, C]
    next_token: Tensor  # [R, C]

    def expected_accepted(self) -> float:
        """E[n], exactly."""
        return float((self.mass * self.accepted).sum())

    def outcomes(self, vocab_size: int) -> Tensor:
        """The probability of every block, number accepted and next token: [R, K + 1, V]."""
        rows, gamma = self.blocks.shape
        law = torch.zeros(rows, (gamma + 1) * vocab_size, dtype=torch.float64)
        law.scatter_add_(1, self.accepted * vocab_size + self.next_token, self.mass)
        return law.view(rows, gamma + 1, vocab_size)


Outcome = Callable[[Tensor, Tensor], Tensor]  # (block index [N], uniforms [N, K + 1]) to [N]


def _changes(outcome: Outcome, points: Tensor, place: int) -> list[Tensor]:
    """Where the uniform at `place` changes the outcome of each block, for any of `points`.

    points: [R, N, K + 1], what the other uniforms are. Halves every interval whose ends differ, so
    it misses what changes and changes back inside one; `_check_cells` is there to see that.
    """
    settings = points.flatten(0, 1)
    column = torch.arange(points.shape[-1]) == place

    def outcome_at(index: Tensor, value: Tensor) -> Tensor:
        uniforms = torch.where(column, value[:, None], settings[index])
        return outcome(index // points.shape[1], uniforms)

    index = torch.arange(len(settings))
    low = torch.zeros(len(settings), dtype=torch.float64)
    high = torch.full_like(low, LARGEST)
    at_low, at_high = outcome_at(index, low), outcome_at(index, high)
    for _ in range(53):
        odd = at_low != at_high
        index, low, high, at_low, at_high = (x[odd] for x in (index, low, high, at_low, at_high))
        middle = (low + high) / 2
        at_middle = outcome_at(index, middle)
        low, high = torch.cat([low, middle]), torch.cat([middle, high])
        at_low, at_high = torch.cat([at_low, at_middle]), torch.cat([at_middle, at_high])
        index = index.repeat(2)
    odd = at_low != at_high
    block = index[odd] // points.shape[1]
    by_block = high[odd][block.argsort()]
    return list(by_block.split(torch.bincount(block, minlength=len(points)).tolist()))


def _edges(changes: list[Tensor]) -> Tensor:
    """0, the distinct places of each block in order, then ones: [R, M]."""
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    rows = []
    for places in changes:
        places = places.sort().values
        is_new = places.diff(prepend=ends[:1]) > 1e-12
        rows.append(torch.cat([ends[:1], places[is_new], ends[1:]]))
    return pad_sequence(rows, batch_first=True, padding_value=1.0)


def _grid(columns: list[Tensor]) -> Tensor:
    """All combinations of the values [R, M_j] of every block: [R, prod M_j, J]."""
    sizes = [column.shape[1] for column in columns]
    parts = []
    for j, column in enumerate(columns):
        shape = [len(column)] + [size if i == j else 1 for i, size in enumerate(sizes)]
        parts.append(column.view(shape).expand(len(column), *sizes))
    return torch.stack(parts, dim=-1).flatten(1, -2)


def _cells(outcome: Outcome, rows: int, gamma: int) -> tuple[Tensor, Tensor]:
    """The boxes of noise, each with one outcome, of every block: low and high [R, C, K + 1].

    The places of a uniform are sought at every combination of the cells of the uniforms before it
    and of the extremes of those after it.
    """
    extremes = torch.tensor([0.0, LARGEST], dtype=torch.float64).expand(rows, 2)
    probes = [extremes] * (gamma + 1)
    edges = []
    for place in range(gamma + 1):
        points = _grid([*probes[:place], extremes[:, :1], *probes[place + 1 :]])
        edges.append(_edges(_changes(outcome, points, place)))
        probes[place] = ((edges[-1][:, :-1] + edges[-1][:, 1:]) / 2).clamp(max=LARGEST)
    return _grid([edge[:, :-1] for edge in edges]), _grid([edge[:, 1:] for edge in edges])


def _check_cells(outcome: Outcome, low: Tensor, high: Tensor, expected: Tensor) -> None:
    """Inside a cell nothing else may matter: other points give the same outcome."""
    generator = torch.Generator().manual_seed(0)
    block = torch.arange(len(low)).repeat_interleave(low.shape[1])
    real = ((high - low) > 1e-9).all(-1).flatten()
    for _ in range(4):
        inside = low + (high - low) * torch.rand(low.shape, generator=generator, dtype=low.dtype)
        found = outcome(block, inside.flatten(0, 1).clamp(max=LARGEST))
        if (real & (found != expected)).any():
            raise LawBroken("the outcome of a round depends on more than its uniforms in turn")


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

    low, high = _cells(outcome, len(blocks), gamma)
    block = torch.arange(len(blocks)).repeat_interleave(low.shape[1])
    middle = ((low + high) / 2).clamp(max=LARGEST)
    found = outcome(block, middle.flatten(0, 1))
    _check_cells(outcome, low, high, found)
    mass = (high - low).prod(-1) * proposal.prod(-1)[:, None]
    found = found.view(mass.shape)
    return Round(blocks, mass, found // vocab_size, found % vocab_size)


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
    law, own = committed_law(measured, target, vocab_size)
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
