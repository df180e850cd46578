"""Who proposes: tokens, and the distribution that they were drawn from.

A proposer sees committed text only (`RoundView`) and returns what it drew together with the q it
drew from, so that verification is exact whatever the proposer is, and stays exact when weights
are swapped between rounds. Here stands a small language model, which proposes token by token or
all in one pass; `ngrams` guess by the text alone, `composite` makes proposers of both, and
`catalogue` names them all.

`propose` runs compiled as one unit: it reads tensors where they are, waits for none of their
values, and all else that it depends on is in `signature`.

Shapes: B rows, N fed tokens, K proposed tokens, E encoder tokens, V vocabulary.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.decoding.state import RoundView
from draftkit.decoding.trees import Tree
from draftkit.models.adapter import Adapter
from draftkit.models.cache import Branches, SlotCache
from draftkit.models.heads import MedusaAdapter
from draftkit.models.shapes import UNBOUNDED
from draftkit.theory.noise import DRAFT, sample
from draftkit.theory.warping import warp


class Proposal(NamedTuple):
    """Tokens and the q of each; `draft_probs` None means one-hot proposals.

    Of a tree the tokens are those of its nodes, [B, N], and lengths speak of depths.
    """

    tokens: Tensor  # [B, K] int64
    draft_probs: Tensor | None  # [B, K, V]
    lengths: Tensor  # [B] valid proposals, at most K


class Proposer:
    """Anything that can guess the next tokens of rows of text.

    A proposer that reads the text alone overrides `propose` and nothing else. One with a cache or
    with weights also overrides what it needs of the rest.
    """

    version = ""  # which weights are in force
    max_positions = UNBOUNDED  # tokens of the longest text that it can continue
    has_cache = False  # whether it must be shown all text, by `prefill` or by taking part
    reads: tuple[int, ...] = ()  # the target's residual streams that it is fed (`models.cache`)
    tree: Tree | None = None  # what it proposes, where it is no chain

    @property
    def signature(self) -> Hashable:
        """Proposers of one signature differ in tensor contents only, so they share code.

        All attributes count: of tensors shape and dtype, of models and parts their signature.
        """
        traits = {
            name: (value.shape, value.dtype)
            if isinstance(value, Tensor)
            else getattr(value, "signature", value)
            for name, value in sorted(vars(self).items())
            if name != "version"
        }
        return (type(self), *traits.items())

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """Propose `gamma` tokens after the committed text of each row, or `view.group.tree`."""
        raise NotImplementedError

    def pick(self, view: RoundView) -> tuple["Proposer", int]:
        """The part of it that this round needs, and how many tokens that proposes.

        Called on the host, so that a part whose passes cost time can be left out.
        """
        return self, view.group.gamma

    def allocate(self, slots: int, capacity: int, encoder_capacity: int = 0) -> None:
        """Make room for `slots` rows of `capacity` tokens."""

    def encode(self, tokens: Tensor, *, lengths: Tensor, rows: Tensor) -> None:
        """Take in the encoder texts `tokens` [B, E] of `lengths` [B] tokens of `rows` [B]."""

    def prefill(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        rows: Tensor,
        visible: int,
        features: Tensor | None,
    ) -> None:
        """Take in `tokens` [B, N] of a prompt at `positions` [B, N] of `rows` [B].

        features: of the tokens before them [B, N, F], where it `reads` some.
        """

    def weights(self) -> dict[str, Tensor]:
        """The weights that `swap` replaces, where they lie; none without a model."""
        return {}

    def swap(self, state_dict: dict[str, Tensor], version: str) -> None:
        """Take new weights in place, between rounds. Raises ValueError where they do not fit."""
        raise ValueError(f"{type(self).__name__} has no weights to swap")


def most_likely(view: RoundView) -> RoundView:
    """`view` for proposals that are not sampled: the first token of the largest logit each."""
    params = view.group.params
    params = replace(
        params,
        temperature=torch.zeros_like(params.temperature),
        uses_greedy=True,
        uses_sampling=False,
        # What is cut off by top-k or top-p is never the largest.
        uses_top_k=False,
        uses_top_p=False,
    )
    return replace(view, group=replace(view.group, params=params))


Decide = Callable[[Tensor, int], Tensor]  # logits [B, n, V] of proposals from number i on: changed


def undecided(logits: Tensor, i: int) -> Tensor:
    """The logits as they are."""
    return logits


def draw(view: RoundView, gamma: int, after: Callable[[Tensor, int], Tensor]) -> Proposal:
    """Draw `gamma` tokens one after the other from the served law of a model's logits.

    after(token, i): [B, 1, V], the logits for proposal i, which follows `token` [B]. Where all rows
    are greedy the proposals are one-hot.
    """
    params, seen, token = view.group.params, view.seen, view.last_two[:, 1]
    uniforms = view.uniform(count=gamma, purpose=DRAFT)  # [B, K]
    tokens, draft_probs = [], []
    for i in range(gamma):
        logits = after(token, i)
        probs = warp(logits, params, None if seen is None else seen[:, None])[:, 0]  # [B, V]
        greedy = view.group.greedy
        token = probs.argmax(-1) if greedy else sample(probs=probs, uniform=uniforms[:, i])
        tokens.append(token)
        draft_probs.append(probs)
        if seen is not None:
            seen = seen.scatter(1, token[:, None], True)
    return Proposal(
        tokens=torch.stack(tokens, dim=1),
        draft_probs=None if view.group.greedy else torch.stack(draft_probs, dim=1),
        lengths=torch.full_like(view.length, gamma),
    )


def grow(
    view: RoundView,
    tree: Tree,
    logits: Tensor,
    read: Callable[[Tensor, Tensor, Branches], Tensor],
) -> Proposal:
    """The tokens of `tree` level by level, from the logits [B, 1, V] behind the text.

    read(tokens, positions, branches): the logits [B, n, V] behind n nodes of a level, those that
    have children.
    """
    levels: list[Tensor] = []
    capacity, first = view.tokens.shape[1], view.length - 1
    bounds = zip(pairwise(tree.starts[1:]), tree.inner[1:], strict=True)
    for depth, ((start, end), inner) in enumerate(bounds, 1):
        ids, of = logits.topk(tree.width).indices, slice(start - 1, end - 1)
        levels.append(ids[:, tree.parent_index[of], tree.order[of]])
        if inner:
            # A filler's text may end anywhere: it must not reach beyond the cache.
            positions = (first + depth).clamp(max=capacity - 1)[:, None].expand(-1, inner)
            branches = tree.branches(first, start, start + inner)
            logits = read(levels[-1][:, :inner], positions, branches)
    lengths = torch.full_like(view.length, tree.depth)
    return Proposal(torch.cat(levels, dim=1), None, lengths=lengths)


class DraftModelProposer(Proposer):
    """A small language model with a cache of its own.

    `tokens` are sampled as the target is served, or the draft's argmax, which engines propose by
    default: then q is one-hot, and a proposal is accepted with probability p(argmax q). With `tree`
    they are the likeliest of it.
    """

    has_cache = True

    def __init__(
        self,
        draft: Adapter,
        *,
        version: str = "",
        tokens: str = "sampled",
        tree: Tree | None = None,
    ) -> None:
        assert tokens in ("sampled", "argmax"), tokens
        self.draft: Any = draft  # an adapter of the kind that the class drafts with
        self.version = version
        self.tokens = tokens
        self.tree = tree
        self.reads = draft.reads
        self.max_positions = draft.max_positions
        self._cache = SlotCache(0, 0)  # until `allocate`

    @property
    def signature(self) -> Hashable:
        tree = None if self.tree is None else self.tree.key
        return (type(self), self.draft.signature, self.tokens, tree)

    def allocate(self, slots: int, capacity: int, encoder_capacity: int = 0) -> None:
        self._cache = SlotCache(slots, capacity, encoder_capacity)

    def encode(self, tokens: Tensor, *, lengths: Tensor, rows: Tensor) -> None:
        cache = self._cache.select(rows, visible=tokens.shape[1])
        self.draft.encode(tokens, lengths=lengths, cache=cache)

    def prefill(self, tokens: Tensor, *, positions: Tensor, features: Any, **where: Any) -> None:
        cache = self._cache.select(**where)
        self.draft.prefill(tokens, positions=positions, cache=cache)

    def propose(self, view: RoundView, gamma: int, decide: Decide = undecided) -> Proposal:
        """Read on to the end of the text, and over each proposal but the last.

        Feeds the last *two* tokens: after full acceptance the cache lacks the last proposal, and
        otherwise writing its slot again is harmless, so no branch is needed.
        """
        view = self.served(view)
        cache = self.cache(view)
        if (tree := view.group.tree) is not None:
            # In the slots of the last round's nodes stands text by now: it is fed again.
            tokens, positions, _ = behind(view, 0, self._cache.capacity)
            logits = self.draft.step(tokens, positions=positions, cache=cache, last=1)
            return grow(
                view,
                tree,
                logits,
                lambda tokens, positions, branches: self.draft.step(
                    tokens, positions=positions, cache=self.cache(view, branches)
                ),
            )

        def after(token: Tensor, i: int) -> Tensor:
            if i == 0:
                offsets = torch.arange(-2, 0, device=view.length.device)
                positions = (view.length[:, None] + offsets).clamp(min=0)  # [B, 2]
                logits = self.draft.step(view.last_two, positions=positions, cache=cache, last=1)
                return decide(logits, 0)
            # A filler's text may end anywhere: it must not reach beyond the cache.
            positions = (view.length + i - 1).clamp(max=cache.capacity - 1)[:, None]
            return decide(self.draft.step(token[:, None], positions=positions, cache=cache), i)

        return draw(view, gamma, after)

    def served(self, view: RoundView) -> RoundView:
        """`view` with the sampling that the draft's tokens are chosen by."""
        sampled = self.tokens == "sampled" and not view.group.greedy
        return view if sampled else most_likely(view)

    def cache(self, view: RoundView, branches: Branches | None = None) -> SlotCache:
        """The draft's cache of the rows of `view`, for text or for `branches` of a tree."""
        return self._cache.select(view.group.rows, visible=view.visible, branches=branches)

    def weights(self) -> dict[str, Tensor]:
        return self.draft.weights()

    def swap(self, state_dict: dict[str, Tensor], version: str) -> None:
        # Rows keep their draft cache, which costs no exactness.
        self.draft.load_weights(state_dict)
        self.version = version


class ParallelProposer(DraftModelProposer):
    """A draft that proposes all tokens in one pass, over masks behind the text (PARD 2504.18583).

    Proposal i is drawn from a law that knows the text and none of the proposals before it. That law
    is the q which is kept, so verification is as exact as for any other.
    """

    def propose(self, view: RoundView, gamma: int, decide: Decide = undecided) -> Proposal:
        """Read on to the end of the text, and over gamma - 1 masks behind it.

        In the slots of the last round's masks stands text by now, at most all that it could commit:
        so much is fed again, whatever came of it, and no branch is needed.
        """
        view = self.served(view)
        cache = self.cache(view)
        fed, positions, is_text = behind(view, gamma - 1, cache.capacity)
        fed = torch.where(is_text, fed, self.draft.parallel.token)
        logits = self.draft.step(fed, positions=positions, cache=cache, last=gamma)
        return at_once(view, decide(logits, 0))


def behind(view: RoundView, more: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """The end of each text, all that a round can commit, and `more` places behind it.

    Returns tokens [B, N], garbage behind the text; positions [B, N] within `capacity`; and which
    places [N] are text.
    """
    text = view.group.most + 1  # tokens that a round commits at most
    offsets = torch.arange(-text, more, device=view.length.device)
    positions = view.length[:, None] + offsets
    fed = view.tokens.gather(1, positions.clamp(min=0, max=view.tokens.shape[1] - 1))
    # A filler's text may end anywhere: it must not reach beyond the cache.
    return fed, positions.clamp(min=0, max=capacity - 1), offsets < 0


def at_once(view: RoundView, logits: Tensor) -> Proposal:
    """Draw a token from the served law of each of `logits` [B, K, V], which know none of them.

    Of a tree nodes of one depth and rank are of one token, whatever their parents.
    """
    if (tree := view.group.tree) is not None:
        ids = logits.topk(tree.width).indices  # [B, D, ranks]
        lengths = torch.full_like(view.length, tree.depth)
        return Proposal(ids[:, tree.depths[1:] - 1, tree.order], None, lengths=lengths)
    gamma, seen = logits.shape[1], None if view.seen is None else view.seen[:, None]
    probs = warp(logits, view.group.params, seen)  # [B, K, V]
    lengths = torch.full_like(view.length, gamma)
    if view.group.greedy:
        return Proposal(probs.argmax(-1), None, lengths=lengths)
    uniforms = view.uniform(count=gamma, purpose=DRAFT)
    return Proposal(sample(probs=probs, uniform=uniforms), probs, lengths=lengths)


class HeadProposer(DraftModelProposer):
    """A head on the target's hidden states (`models.heads`): token by token, or in one pass.

    What a round committed is fed again, beside the target's own features of it: states that the
    head made of its proposals never stay. A text of one token has no features, and no proposals.
    """

    def prefill(self, tokens: Tensor, *, positions: Tensor, features: Any, **where: Any) -> None:
        hidden, cache = self.draft.project(features), self._cache.select(**where)
        self.draft.fill(tokens, hidden, positions=positions, cache=cache)

    def propose(self, view: RoundView, gamma: int, decide: Decide = undecided) -> Proposal:
        view, parallel = self.served(view), self.draft.parallel
        cache = self.cache(view)
        more = 0 if parallel is None else gamma - 1
        fed, positions, is_text = behind(view, more, cache.capacity)
        features = view.features((positions - 1).clamp(min=0), self.reads)
        if parallel is not None:
            fed = torch.where(is_text, fed, parallel.token)
            features = torch.where(is_text[:, None], features, self.draft.mask_features)
        hidden = self.draft.project(features)
        state = self.draft.feed(fed, hidden, positions=positions, cache=cache, last=more + 1)

        def after(token: Tensor, i: int) -> Tensor:
            nonlocal state
            if i > 0:
                positions = (view.length + i - 1).clamp(max=cache.capacity - 1)[:, None]
                state = self.draft.feed(token[:, None], state, positions=positions, cache=cache)
            return decide(self.draft.logits(state), i)

        def read(tokens: Tensor, positions: Tensor, branches: Branches) -> Tensor:
            nonlocal state
            hidden = state[:, branches.parent_index]  # what the head made of the parents
            own = self.cache(view, branches)
            state = self.draft.feed(tokens, hidden, positions=positions, cache=own)
            return self.draft.logits(state)

        if parallel is not None:
            proposal = at_once(view, decide(self.draft.logits(state), 0))
        elif (tree := view.group.tree) is not None:
            proposal = grow(view, tree, self.draft.logits(state), read)
        else:
            proposal = draw(view, gamma, after)
        # A row has features where the target has read all of its text but the end.
        return proposal._replace(lengths=torch.where(view.length > 1, proposal.lengths, 0))


class MedusaProposer(DraftModelProposer):
    """Heads of Medusa, which propose on the features of the last token but one alone."""

    has_cache = False

    def prefill(self, *_: Any, **__: Any) -> None:
        """Nothing: the target keeps all that it reads."""

    def propose(self, view: RoundView, gamma: int, decide: Decide = undecided) -> Proposal:
        view = self.served(view)
        features = view.features((view.length - 2).clamp(min=0)[:, None], self.reads)
        count = min(gamma, self.draft.blocks)
        states = torch.cat([self.draft.made_of(features, block) for block in range(count)], 1)
        logits = self.draft.head(states)
        if gamma > count:  # which no head was trained for
            logits = torch.cat([logits, logits[:, -1:].expand(-1, gamma - count, -1)], 1)
        proposal = at_once(view, decide(logits, 0))
        lengths = proposal.lengths.clamp(max=count)
        return proposal._replace(lengths=torch.where(view.length > 1, lengths, 0))


def drafting(draft: Adapter, **settings: Any) -> DraftModelProposer:
    """The proposer of `draft`, of the kind that it was trained for; settings: of that class."""
    kind: type[DraftModelProposer] = DraftModelProposer
    if isinstance(draft, MedusaAdapter):
        kind = MedusaProposer
    elif draft.reads:
        kind = HeadProposer
    elif draft.parallel is not None:
        kind = ParallelProposer
    return kind(draft, **settings)
