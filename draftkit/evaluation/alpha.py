"""Alpha on shared contexts: continuations that the target sampled, scored by target and draft.

The target continues held-out prompts once under the served sampling; every draft that is compared
is scored on those same positions, so gains are paired. At each position p and q are warped by the
very function that serves (P1), and the acceptance modes are summed by prompt; their errors are
those of documents. Where `sampling` is null, each context is scored under the sampling that it was
served with.

From the same scores follow the tokens a pass of the target at any gamma (`tokens_a_pass`), in law
those of the decoder, for each way in which engines verify.

Shapes: M generated positions, V vocabulary, P prompts, T tokens of a text.
"""

import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.config import Config, SamplingConfig
from draftkit.data.rollouts import Record, document_of
from draftkit.decoding.generation import Completion
from draftkit.evaluation.intervals import LEAST_UNITS, Estimate, estimate, proportion
from draftkit.models.adapter import Adapter
from draftkit.models.heads import MedusaAdapter
from draftkit.models.parallel import chains, unrolled
from draftkit.theory.acceptance import (
    MODES,
    SHARES,
    Rate,
    rounds_of_texts,
    sampled_acceptance,
    sampled_share,
)
from draftkit.theory.truncation import alpha_bounds, coarse_target
from draftkit.theory.warping import SamplingParams, seen_along, seen_tokens, warp

# Of engines that cut the target by top-k and top-p and the draft not: `alpha` with such a q.
UNCUT = "alpha_uncut_draft"
OWN_LAW = SamplingConfig()  # of the target: temperature 1, nothing cut
TREE_RANKS = 16  # of a law, that nodes of a tree may have
CHAINS_AT_ONCE = 128  # that begin in a text: masks grow with the square of what is read together


@dataclass(frozen=True)
class PromptTotals:
    """Sums over the positions of each prompt [P], by mode, and the number of positions [P].

    shares: by mode, of each text, P(its token was an accepted proposal | the token) [T], of a
    parallel draft, and of a head, by the position in its round [T, K]; empty where texts were
    scored by stored scores. in_one_pass: whether the draft proposes so. cut: which texts no end of
    text ended [P]. documents: what each prompt belongs to [P]; empty where each is a document of
    its own. accepted, entropies: of each text, sum min(p, q) and the entropy of the target's own
    law (temperature 1, nats) at every token [T]; domains: of each text; all three empty as
    `shares`.
    """

    totals: dict[str, Tensor]
    counts: Tensor
    shares: dict[str, list[Tensor]] = field(default_factory=dict)
    cut: Tensor | None = None
    documents: Sequence[Hashable] = ()
    accepted: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    domains: Sequence[str] = ()
    in_one_pass: bool = False

    def as_dict(self) -> dict[str, Any]:
        """By mode, and the positions, and the documents by number."""
        lists = {mode: totals.tolist() for mode, totals in self.totals.items()}
        documents = self.documents or range(len(self.counts))
        numbers = {key: number for number, key in enumerate(dict.fromkeys(documents))}
        numbered = [numbers[key] for key in documents]
        return {**lists, "positions": self.counts.tolist(), "documents": numbered}

    def rate(self, mode: str = "alpha") -> Rate:
        """The acceptance over all positions."""
        return Rate(self.totals[mode], self.counts, self.documents)

    @property
    def one_by_one(self) -> "PromptTotals":
        """Of a draft that proposes in one pass: as a draft that proposes token by token."""
        first = {
            mode: [share if share.dim() == 1 else share[:, 0] for share in shares]
            for mode, shares in self.shares.items()
        }
        return replace(self, shares=first)

    def tokens_a_pass(self, mode: str, gamma: int) -> Rate:
        """tau of decoding with `gamma` proposals a round in this mode, as a rate over prompts."""
        rounds = rounds_of_texts(self.shares[mode], gamma, cut=self.cut)
        return rounds._replace(documents=self.documents)

    @property
    def alpha(self) -> Estimate:
        """Alpha over all positions, its interval over documents."""
        return proportion(self.rate())

    def gain(
        self, before: "PromptTotals", mode: str = "alpha", *, least: int = LEAST_UNITS
    ) -> Estimate:
        """What was gained since `before`, paired: on the same prompts and contexts."""
        return estimate(self.rate(mode), before.rate(mode), compare=operator.sub, least=least)


def score_contexts(
    target: Adapter,
    draft: Adapter,
    contexts: Sequence[Record],
    *,
    sampling: SamplingConfig | None,
    batch_size: int,
) -> PromptTotals:
    """Return the acceptance modes of `draft` on `contexts`, summed by prompt in float64."""
    drafts = {"draft": draft}
    return score_drafts(target, drafts, contexts, sampling=sampling, batch_size=batch_size)["draft"]


@torch.inference_mode()
def score_drafts(
    target: Adapter,
    drafts: Mapping[str, Adapter],
    contexts: Sequence[Record],
    *,
    sampling: SamplingConfig | None,
    batch_size: int,
    eos_token_ids: Sequence[int] = (),
    blocks: int | None = None,
) -> dict[str, PromptTotals]:
    """`score_contexts` of several drafts, for which the target reads each context once.

    Where `sampling` cuts, there is also the mode `UNCUT`. eos_token_ids: that end a text. blocks:
    proposals of a pass of a parallel draft; None: those that it was trained for.
    """
    uncut = None if sampling is None else replace(sampling, top_k=0, top_p=1.0)
    cuts = uncut != sampling and sampling is not None and sampling.temperature > 0
    modes = {**MODES, UNCUT: sampled_acceptance} if cuts else MODES
    as_proposed = (sampling, uncut) if cuts else (sampling,)
    own_too = (sampling,) if sampling == OWN_LAW else (sampling, OWN_LAW)
    totals: dict[str, dict[str, list[float]]] = {n: {m: [] for m in modes} for n in drafts}
    shares: dict[str, dict[str, list[Tensor]]] = {n: {m: [] for m in modes} for n in drafts}
    accepted: dict[str, list[Tensor]] = {n: [] for n in drafts}
    entropies: list[Tensor] = []
    layers = tuple(sorted({layer for draft in drafts.values() for layer in draft.reads}))
    for first in range(0, len(contexts), batch_size):
        chunk = contexts[first : first + batch_size]
        target_rows = []
        logits, features = _read(target, chunk, layers)
        for laws in _served(chunk, logits, *own_too):
            target_rows.append(laws[0])
            entropies.append(torch.special.entr(laws[-1]).sum(-1).double().cpu())
        for name, draft in drafts.items():
            own = [features[layer] for layer in draft.reads]
            draft_rows = _proposed(
                draft,
                chunk,
                *as_proposed,
                blocks=blocks,
                features=torch.cat(own, -1) if own else None,
            )
            for one, target_probs, positions in zip(chunk, target_rows, draft_rows, strict=True):
                by_mode: dict[str, list[Tensor]] = {mode: [] for mode in modes}
                tokens = torch.tensor(one.output_ids, device=target_probs.device)
                for at, laws in enumerate(positions):
                    for mode, acceptance in modes.items():
                        q = laws[-1 if mode == UNCUT else 0]
                        both = {"target_probs": target_probs[at:], "draft_probs": q}
                        if at == 0:
                            own = acceptance(**both).double()
                            totals[name][mode].append(float(own.sum()))
                            if mode == "alpha":
                                accepted[name].append(own.cpu())
                        share = SHARES.get(mode, sampled_share)(**both, tokens=tokens[at:])
                        by_mode[mode].append(share.double().cpu())
                for mode, columns in by_mode.items():
                    shares[name][mode].append(_side_by_side(columns, is_chained(draft)))
    for name, sums in totals.items():
        if not all(map(math.isfinite, sums["alpha"])):
            raise ValueError(f"logits of the target or of the drafter ({name}) are not finite")
    cut = torch.tensor([not {*one.output_ids[-1:]} & {*eos_token_ids} for one in contexts])
    same = {"cut": cut, "entropies": entropies, "domains": [one.domain for one in contexts]}
    return {
        name: replace(
            _by_prompt(contexts, totals[name]),
            shares=shares[name],
            accepted=accepted[name],
            in_one_pass=drafts[name].parallel is not None,
            **same,
        )
        for name in drafts
    }


@torch.inference_mode()
def rank_rates(
    target: Adapter, draft: Adapter, contexts: Sequence[Record], config: Config
) -> list[list[float]]:
    """How likely the r-th likeliest token of each place in a round is the target's: [D][R].

    Given that those before it are the text's. D is `Config.proposals`; a draft that reads its own
    proposals like any text has the same rates everywhere.
    """
    most, ranks = max(config.proposals, 1), min(TREE_RANKS, draft.vocab_size)
    sums = torch.zeros(most, ranks, dtype=torch.float64)
    counts = torch.zeros(most, 1, dtype=torch.float64)
    size = config.evaluate.batch_size
    for first in range(0, len(contexts), size):
        chunk = contexts[first : first + size]
        logits, streams = _read(target, chunk, draft.reads)
        own = [streams[layer] for layer in draft.reads]
        features = torch.cat(own, -1) if own else None
        rows = _proposed(draft, chunk, OWN_LAW, blocks=most, features=features)
        for (law,), positions in zip(_served(chunk, logits, config.sampling), rows, strict=True):
            for depth, (proposed,) in enumerate(positions):
                likeliest = proposed.topk(ranks).indices
                sums[depth] += law[depth:].gather(1, likeliest).double().sum(0).cpu()
                counts[depth] += len(likeliest)
    rates = sums / counts.clamp(min=1)
    return (rates if is_chained(draft) else rates[:1].expand(most, -1)).tolist()


@torch.inference_mode()
def surprise(
    target: Adapter, answers: Sequence[Completion], sampling: SamplingConfig, *, batch_size: int
) -> float:
    """How far the mean log-probability of `answers` lies above what it is of the target's samples.

    In standard deviations: of samples, each token's log p less its mean under the served law adds
    nothing on average, whatever came before, so that the sum is normal for many tokens.
    """
    total, variance = 0.0, 0.0
    for first in range(0, len(answers), batch_size):
        chunk: Any = answers[first : first + batch_size]
        logits, _ = _read(target, chunk)
        for one, (law,) in zip(chunk, _served(chunk, logits, sampling), strict=True):
            law = law.double()
            tokens = torch.tensor(one.output_ids, device=law.device)[:, None]
            log_p = law.clamp(min=torch.finfo(torch.float64).tiny).log()
            mean = (law * log_p).sum(-1)
            total += float((log_p.gather(1, tokens)[:, 0] - mean).sum())
            variance += float(((law * log_p.square()).sum(-1) - mean.square()).sum())
    return total / variance**0.5 if variance > 0 else 0.0


def _by_prompt(contexts: Sequence[Record], totals: dict[str, list[float]]) -> PromptTotals:
    counts = torch.tensor([len(c.output_ids) for c in contexts], dtype=torch.float64)
    documents = [document_of(one) for one in contexts]
    return PromptTotals(
        {m: torch.tensor(v, dtype=torch.float64) for m, v in totals.items()},
        counts,
        documents=documents,
    )


def is_chained(draft: Adapter) -> bool:
    """Whether the law of a proposal depends on its place in a round, beside the text before it."""
    return draft.parallel is not None or bool(draft.reads)


def _read(
    model: Adapter, contexts: Sequence[Record], layers: tuple[int, ...] = ()
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """The logits [M, V] of `model` at the outputs of each of `contexts`, and its streams of
    `layers`, each [B, T, H]."""
    prompts, outputs = [c.prompt_ids for c in contexts], [c.output_ids for c in contexts]
    tokens, keep = padded(prompts, outputs, model.device)
    streams: dict[int, Tensor] = {}
    if layers:
        logits, joined = model.read(tokens, keep, layers)
        assert joined is not None
        streams = dict(zip(layers, joined.chunk(len(layers), -1), strict=True))
        logits = logits if model.head is None else model.head(logits)
    else:
        logits = model.score(tokens, keep)
    return list(logits.split([len(one.output_ids) for one in contexts])), streams


def _served(
    contexts: Sequence[Record], logits: Sequence[Tensor], *samplings: SamplingConfig | None
) -> Iterator[list[Tensor]]:
    """The probabilities [M, V] of each of `contexts`, by `samplings`, of its `logits` [M, V].

    One text at a time, so that what is made of its logits stays in a processor's cache.
    """
    for context, rows in zip(contexts, logits, strict=True):
        yield [_warped(rows, context, sampling or sampling_of(context)) for sampling in samplings]


def _proposed(
    draft: Adapter,
    contexts: Sequence[Record],
    *samplings: SamplingConfig | None,
    blocks: int | None = None,
    features: Tensor | None = None,
) -> Iterator[Iterable[list[Tensor]]]:
    """Of each text the probabilities of proposals, by their position in a round, by `samplings`.

    A draft that reads its own proposals like any text has one position, which stands for all.
    features: of the target on the padded texts [B, T, F], for a head.
    """
    if not is_chained(draft):
        logits, _ = _read(draft, contexts)
        yield from ([laws] for laws in _served(contexts, logits, *samplings))
        return
    for row, one in enumerate(contexts):
        own = None if features is None else features[row : row + 1]
        yield _chained(draft, one, *samplings, blocks=blocks, features=own)


def _chained(
    draft: Adapter,
    context: Record,
    *samplings: SamplingConfig | None,
    blocks: int | None = None,
    features: Tensor | None = None,
) -> Iterator[list[Tensor]]:
    """The probabilities [M - b, V] of each block b of a draft that proposes chains, by `samplings`.

    Row i is what the draft proposes as token i + b of the output, in a round that begins behind i
    tokens of it; zeros where a head has no features, behind a text of one token.
    """
    count = len(context.output_ids)
    blocks = min(blocks or draft.blocks, count)
    if isinstance(draft, MedusaAdapter):  # which has no more heads than it was trained with
        blocks = min(blocks, draft.blocks)
    tokens, keep = padded([context.prompt_ids], [context.output_ids], draft.device)
    if features is not None:
        features = features[:, : tokens.shape[1]]
    if draft.parallel is None:
        rows = unrolled(tokens, keep, blocks, keep)
        parts = draft(rows, features).split([int(part.sum()) for part in rows.keep])
    else:
        parts = _in_one_pass(draft, context, tokens, keep, blocks, features)
    lacking = features is not None and len(context.prompt_ids) < 2
    for made in parts:
        logits = made if draft.head is None else draft.head(made)
        if lacking:
            logits = torch.cat([logits.new_zeros(1, draft.vocab_size), logits])
        laws = [_warped(logits, context, one or sampling_of(context)) for one in samplings]
        for law in laws:
            law[:lacking] = 0
        yield laws


def _in_one_pass(
    draft: Adapter,
    context: Record,
    tokens: Tensor,
    keep: Tensor,
    blocks: int,
    features: Tensor | None,
) -> list[Tensor]:
    """The states [M - b, H] of each block b of a parallel draft."""
    assert draft.parallel is not None
    count = len(context.output_ids)
    first = len(context.prompt_ids) - 1
    states: list[list[Tensor]] = [[] for _ in range(blocks)]
    for begin in range(0, count, CHAINS_AT_ONCE):
        depth = torch.zeros_like(tokens)
        depth[:, first + begin : first + begin + CHAINS_AT_ONCE] = blocks
        if features is not None:
            depth[:, 0] = 0
        end = first + begin + CHAINS_AT_ONCE + blocks
        rows = chains(
            tokens[:, :end],
            keep[:, :end],
            depth[:, :end] * keep[:, :end],
            token=draft.parallel.token,
        )
        if features is None:
            made = draft.states(rows.tokens, rows.keep, rows.packing)
        else:
            made = draft(rows, features[:, :end])
        for block, parts in enumerate(states):
            parts.append(made[rows.blocks == block])
    return [torch.cat(parts) for parts in states]


def _side_by_side(columns: Sequence[Tensor], parallel: bool) -> Tensor:
    """Shares [T, T - 1, ...] of the positions of a round as [T, K], 0 where none is; [T] of one."""
    if not parallel:
        return columns[0]
    whole = columns[0].new_zeros(len(columns[0]), len(columns))
    for position, column in enumerate(columns):
        whole[position:, position] = column
    return whole


def _warped(logits: Tensor, context: Record, served: SamplingConfig) -> Tensor:
    """The probabilities [m, V] that `served` makes of `logits` [m, V] at the first outputs.

    The text before them is what a repetition penalty looks at.
    """
    seen, device, vocab_size = None, logits.device, logits.shape[-1]
    if served.repetition_penalty != 1:  # the ids before each position [1, M, V]
        prompt, outputs = (
            torch.tensor([ids], device=device) for ids in (context.prompt_ids, context.output_ids)
        )
        length = torch.tensor([prompt.shape[1]], device=device)
        seen = seen_along(seen_tokens(prompt, length, vocab_size), outputs)[:, : len(logits)]
    params = SamplingParams.uniform(1, **vars(served), device=device)
    return warp(logits[None], params, seen)[0]


@torch.inference_mode()
def score_stored(
    draft: Adapter, contexts: Sequence[Record], *, sampling: SamplingConfig | None, batch_size: int
) -> tuple[PromptTotals, Tensor]:
    """Alpha of `draft` on contexts with stored scores of the target, which need not be in memory.

    Counts what both surely give to the stored ids, so that alpha is never overstated; returned with
    it, by prompt [P]: the most that is missing, summed over positions (`alpha_bounds`). Shares are
    of all tokens in the position of the one that came. Raises
    ValueError under a repetition penalty, of which stored scores know nothing.
    """
    device, totals, missing, shares = draft.device, [], [], []
    for first in range(0, len(contexts), batch_size):
        chunk = contexts[first : first + batch_size]
        read = [one.features for one in chunk if one.features is not None and draft.reads]
        features = pad_sequence(read, batch_first=True).to(device) if read else None
        laws = _proposed(draft, chunk, sampling, features=features)
        for context, positions in zip(chunk, laws, strict=True):
            served = sampling or sampling_of(context)
            if served.repetition_penalty != 1:
                raise ValueError(
                    "generate.top_k: stored scores do not know a repetition penalty: use"
                    " generate.top_k=0"
                )
            ids = torch.tensor(context.topk_ids, device=device)
            least, most = (
                coarse_target(
                    torch.tensor(context.topk_log_probs, device=device),
                    torch.tensor(context.tail_mass, device=device),
                    temperature=served.temperature or 1.0,
                    top_k=served.top_k if served.temperature > 0 else 1,
                    top_p=served.top_p if served.temperature > 0 else 1.0,
                    least=least,
                )
                for least in (True, False)
            )
            columns = []
            for position, (law,) in enumerate(positions):
                low, high = alpha_bounds(
                    least=least[position:],
                    most=most[position:],
                    draft_probs=law.gather(-1, ids[position:]),
                )
                columns.append(low.double().cpu())
                if position == 0:
                    totals.append(float(low.double().sum()))
                    missing.append(float((high - low).double().sum()))
            shares.append(_side_by_side(columns, is_chained(draft)))
    scored = replace(_by_prompt(contexts, {"alpha": totals}), shares={"alpha": shares})
    return scored, torch.tensor(missing, dtype=torch.float64)


def estimates(scored: PromptTotals) -> dict[str, Estimate]:
    """Mean and interval of each mode."""
    return {mode: proportion(scored.rate(mode)) for mode in scored.totals}


def sampling_of(context: Record) -> SamplingConfig:
    """The sampling that `context` was served with."""
    values: dict[str, Any] = {**context.sampling, "top_k": int(context.sampling["top_k"])}
    return SamplingConfig(**values)


def padded(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], padded on the right, and the positions [B, T] that predict outputs."""
    rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    keep = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        keep[index, len(prompt) - 1 : len(row) - 1] = True
    return tokens, keep
