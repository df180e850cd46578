"""Guesses without a model: tables of counts, the row's own text, and past answers.

A count table is a law like any other: tokens are drawn from it as the target is served, and q is
what it says. Prompt lookup and the n-gram memory name one token each time, so their q is one-hot: a
proposal is accepted with probability p(x), and the correction is p without x. Nothing here can
touch exactness: a guess depends on committed text and on past answers only, and is tested like any
other.

This module knows no models, no caches and no text but token ids.

Shapes: B rows, L tokens a row can hold, K proposed tokens, V vocabulary, M learned tokens, C
tokens of the longest context, O orders (lengths of context) from short to long.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftkit.decoding.proposers import Proposal, Proposer, draw, most_likely
from draftkit.decoding.state import RoundView

LARGEST_BIGRAM_VOCABULARY = 8192  # a table of 256 MiB

_MULTIPLIER = 0x7FEB352D  # odd; its powers weigh the tokens of a context


def count_table(texts: Iterable[Sequence[int]], *, vocab_size: int, order: int) -> Tensor:
    """Log-probabilities of the next token: [V] of order 1, [V, V] by the last token of order 2.

    Each row has one count of nothing: of order 1 it is spread evenly, of order 2 as the tokens of
    order 1 (the mean of a Dirichlet prior; MacKay and Peto 1995). Returns float32. Raises
    ValueError where a [V, V] table would be too large.
    """
    if order == 2 and vocab_size > LARGEST_BIGRAM_VOCABULARY:
        raise ValueError(
            f"a bigram table of {vocab_size} x {vocab_size} tokens would take "
            f"{vocab_size**2 * 4 / 2**30:.1f} GiB: above {LARGEST_BIGRAM_VOCABULARY} tokens use "
            "decode.proposer=unigram, prompt_lookup or ngram"
        )
    singles = torch.zeros(vocab_size)
    pairs = torch.zeros(vocab_size * vocab_size if order == 2 else 0)
    for text in texts:
        ids = torch.tensor(list(text), dtype=torch.long)
        singles += torch.bincount(ids, minlength=vocab_size)
        if order == 2:
            followed = ids[:-1] * vocab_size + ids[1:]
            pairs.index_add_(0, followed, torch.ones(len(followed)))
    law = (singles + 1 / vocab_size) / (singles.sum() + 1)
    if order == 1:
        return law.log()
    pairs = pairs.view(vocab_size, vocab_size)
    totals = pairs.sum(1, keepdim=True)
    return pairs.add_(law).div_(totals + 1).log_()


class CountTable(Proposer):
    """Draws tokens from a table of log-probabilities [V] or [V, V], as `count_table` makes them."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        if view.group.greedy:
            view = most_likely(view)

        def after(token: Tensor, _: int) -> Tensor:
            rows = self.table.expand(len(token), -1) if self.table.dim() == 1 else self.table[token]
            return rows[:, None]

        return draw(view, gamma, after)


class PromptLookup(Proposer):
    """Goes on as the text did after the last earlier occurrence of its last tokens.

    As many last tokens as possible, `max_ngram` at most and `min_ngram` at least, must occur
    before. What followed them is proposed; where it runs into the end of the text, the text is
    taken to go on repeating itself.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """One-hot proposals; none for rows without a match."""
        text = view.tokens[:, : view.visible]
        last = view.length.clamp(max=view.visible) - 1  # fillers may be longer than is visible
        position = torch.arange(text.shape[1], device=text.device)
        matches = position < last[:, None]  # [B, L] so far, an occurrence that ends here
        matched = torch.zeros_like(text, dtype=torch.int32)  # tokens
        for n in range(self.max_ngram):
            token = text.gather(1, (last[:, None] - n).clamp(min=0))
            matches = matches & F.pad(text == token, (n, 0))[:, : text.shape[1]]
            matched = matched + matches
        longest = matched.amax(1, keepdim=True)
        end = torch.where(matched == longest, position, -1).amax(1)  # the last one
        period = (last - end).clamp(min=1)
        index = (end + 1)[:, None] + torch.arange(gamma, device=text.device) % period[:, None]
        tokens = text.gather(1, index.clamp(max=text.shape[1] - 1))
        lengths = torch.where(longest[:, 0] >= self.min_ngram, gamma, 0)
        return Proposal(tokens, None, lengths=lengths)


class NgramMemory(Proposer):
    """What followed the last tokens in past answers, longest context first.

    A hash table of `cells` cells for each length of context from 1 to `max_ngram`: a cell
    holds the number of a context and the token that followed it last. Contexts that share a cell
    overwrite each other; those that share a number as well, few of many millions, are taken for
    each other.
    """

    def __init__(
        self,
        *,
        max_ngram: int = 4,
        cells: int = 1 << 18,
        device: torch.device | str | None = None,
    ) -> None:
        self._orders = torch.arange(1, max_ngram + 1, device=device)
        powers = [pow(_MULTIPLIER, n + 1, 1 << 31) for n in range(max_ngram)]
        self._weights = torch.tensor(powers, device=device)  # [C]
        self._cells = cells - 1  # an odd number: the rest of a division depends on all bits
        # Where each table begins: made here, since units compute nothing large of indices.
        self._starts = torch.arange(len(self._orders), device=device) * cells
        self.numbers = torch.full((len(self._orders) * cells,), -1, device=device)
        self.tokens = torch.zeros_like(self.numbers)

    def learn(self, texts: Iterable[Sequence[int]]) -> None:
        """Remember what follows what in `texts`, in place; the newest wins."""
        longest = len(self._weights)
        ids = [-1] * (longest + 1)
        for text in texts:
            ids += [*text, -1]
        # Every token with those before it; a gap between two texts has id -1.
        windows = torch.tensor(ids, device=self.tokens.device).unfold(0, longest + 1, 1)
        recent, token = windows[:, :-1].flip(1), windows[:, -1:]  # [M, C] newest first, [M, 1]
        inside = (recent >= 0).long().cumprod(1).sum(1)  # tokens of the same text
        is_known = (inside[:, None] >= self._orders) & (token >= 0)  # [M, O]
        numbers, cells = (part[is_known] for part in self._look_up(recent))  # in order of the texts
        cells, order = cells.sort(stable=True)
        is_newest = cells.diff(append=cells.new_full((1,), -1)) != 0
        cells, order = cells[is_newest], order[is_newest]
        self.numbers[cells] = numbers[order]
        self.tokens[cells] = token.expand(is_known.shape)[is_known][order]

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """One-hot proposals, up to the first context that is not known."""
        back = torch.arange(len(self._weights), device=view.tokens.device)
        recent = view.tokens.gather(1, (view.length[:, None] - 1 - back).clamp(min=0))
        is_alive = torch.ones_like(view.length, dtype=torch.bool)
        lengths = torch.zeros_like(view.length)
        tokens = []
        for i in range(gamma):
            numbers, cells = self._look_up(recent)
            hits = (self.numbers[cells] == numbers) & (view.length[:, None] + i >= self._orders)
            best = (hits * self._orders).argmax(1, keepdim=True)
            is_alive = is_alive & hits.any(1)
            token = torch.where(is_alive, self.tokens[cells].gather(1, best)[:, 0], 0)
            tokens.append(token)
            lengths = lengths + is_alive
            recent = torch.cat([token[:, None], recent[:, :-1]], dim=1)
        return Proposal(torch.stack(tokens, dim=1), None, lengths=lengths)

    def _look_up(self, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [N, O] of the contexts `recent` [N, C], newest first, and their cells."""
        sums = ((recent + 1) * self._weights).cumsum(1)  # below 2^63 for ids below 2^24
        return sums, self._starts + sums % self._cells
