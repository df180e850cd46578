"""Alpha on shared contexts: continuations that the target sampled, scored by target and draft.

The target continues held-out prompts once under the served sampling; every draft that is compared
is scored on those same positions, so gains are paired. At each position p and q are warped by the
very function that serves (P1), and the acceptance modes are summed by prompt; their errors are
those of documents. Where `sampling` is null, each context is scored under the sampling that it was
served with.

From the same scores follow the tokens a pass of the target at any gamma (`tokens_a_pass`), in law
those of the decoder, for each way in which engines verify, and where 1 - alpha is lost
(`breakdown`).

Shapes: M generated positions, V vocabulary, P prompts, T tokens of a text.
"""

import math
import operator
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record, document_of
from draftkit.evaluation.intervals import LEAST_UNITS, Estimate, estimate, proportion
from draftkit.evaluation.laws import (
    OWN_LAW,
    is_chained,
    logits_of,
    proposed_laws,
    sampling_of,
    served_laws,
)
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import (
    MODES,
    SHARES,
    Rate,
    rounds_of_texts,
    sampled_acceptance,
    sampled_share,
)
from draftkit.theory.truncation import alpha_bounds, coarse_target, tail_bounds

# Of engines that cut the target by top-k and top-p and the draft not: `alpha` with such a q.
UNCUT = "alpha_uncut_draft"
# Parts of a breakdown: where each begins, and its name. Nats of the target's own law, and tokens
# of the answer.
ENTROPIES = {0: "under 0.5", 0.5: "0.5 to 1", 1: "1 to 2", 2: "2 to 3", 3: "3 and more"}
POSITIONS = {1: "1 to 8", 9: "9 to 32", 33: "33 to 128", 129: "129 to 512", 513: "513 and more"}
UNSURE = 2  # nats, from which the target itself is unsure: as of 7 tokens that are equally likely
CATEGORIES, OTHERS = 16, "others"  # parts of the categories with the most prompts, and of the rest


@dataclass(frozen=True)
class PromptTotals:
    """What a draft scored, by prompt; where scores were stored all behind `cut` is empty."""

    totals: dict[str, Tensor]  # by mode, sums over the positions of each prompt [P]
    counts: Tensor  # positions [P]
    # By mode, of each text, P(its token was an accepted proposal | the token) [T]; of a parallel
    # draft, and of a head, by the position in its round [T, K].
    shares: dict[str, list[Tensor]] = field(default_factory=dict)
    documents: Sequence[Hashable] = ()  # of each prompt; empty: each is a document of its own
    cut: Tensor | None = None  # which texts no end of text ended [P]
    accepted: list[Tensor] = field(default_factory=list)  # of each text sum min(p, q) [T]
    entropies: list[Tensor] = field(default_factory=list)  # the target's own law's, nats [T]
    domains: Sequence[str] = ()  # of each text
    in_one_pass: bool = False  # whether the draft proposes so

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
    layers = tuple(sorted({layer for draft in drafts.values() for layer in draft.reads}))
    # By draft and mode, of each text: the acceptance of its tokens [T], and the shares.
    accepted: dict[str, dict[str, list[Tensor]]] = {n: {m: [] for m in modes} for n in drafts}
    shares: dict[str, dict[str, list[Tensor]]] = {n: {m: [] for m in modes} for n in drafts}
    entropies: list[Tensor] = []
    for first in range(0, len(contexts), batch_size):
        chunk = contexts[first : first + batch_size]
        target_rows = []
        logits, streams = logits_of(target, chunk, layers)
        for laws in served_laws(chunk, logits, *own_too):
            target_rows.append(laws[0])
            entropies.append(torch.special.entr(laws[-1]).sum(-1).double().cpu())
        for name, draft in drafts.items():
            read = [streams[layer] for layer in draft.reads]
            features = torch.cat(read, -1) if read else None
            rows = proposed_laws(draft, chunk, *as_proposed, blocks=blocks, features=features)
            for one, target_probs, positions in zip(chunk, target_rows, rows, strict=True):
                columns: dict[str, list[Tensor]] = {mode: [] for mode in modes}
                tokens = torch.tensor(one.output_ids, device=target_probs.device)
                for at, laws in enumerate(positions):
                    for mode, acceptance in modes.items():
                        q = laws[-1 if mode == UNCUT else 0]
                        both = {"target_probs": target_probs[at:], "draft_probs": q}
                        if at == 0:
                            accepted[name][mode].append(acceptance(**both).double().cpu())
                        share = SHARES.get(mode, sampled_share)(**both, tokens=tokens[at:])
                        columns[mode].append(share.double().cpu())
                for mode, parts in columns.items():
                    shares[name][mode].append(_side_by_side(parts, is_chained(draft)))
    cut = torch.tensor([not {*one.output_ids[-1:]} & {*eos_token_ids} for one in contexts])
    scored = {}
    for name, by_mode in accepted.items():
        sums = {mode: [float(one.sum()) for one in texts] for mode, texts in by_mode.items()}
        if not all(map(math.isfinite, sums["alpha"])):
            raise ValueError(f"logits of the target or of the drafter ({name}) are not finite")
        scored[name] = _by_prompt(
            contexts,
            sums,
            shares=shares[name],
            accepted=by_mode["alpha"],
            in_one_pass=drafts[name].parallel is not None,
            cut=cut,
            entropies=entropies,
            domains=[one.domain for one in contexts],
        )
    return scored


def _by_prompt(
    contexts: Sequence[Record], sums: dict[str, list[float]], **others: Any
) -> PromptTotals:
    counts = torch.tensor([len(c.output_ids) for c in contexts], dtype=torch.float64)
    totals = {mode: torch.tensor(values, dtype=torch.float64) for mode, values in sums.items()}
    documents = [document_of(one) for one in contexts]
    return PromptTotals(totals, counts, documents=documents, **others)


def _side_by_side(columns: Sequence[Tensor], is_chained: bool) -> Tensor:
    """Shares [T, T - 1, ...] of the positions of a round as [T, K], 0 where none is; [T] of one."""
    if not is_chained:
        return columns[0]
    whole = columns[0].new_zeros(len(columns[0]), len(columns))
    for position, column in enumerate(columns):
        whole[position:, position] = column
    return whole


@torch.inference_mode()
def score_stored(
    draft: Adapter,
    contexts: Sequence[Record],
    *,
    sampling: SamplingConfig | None,
    batch_size: int,
    tails_known: bool = True,
) -> tuple[PromptTotals, Tensor]:
    """Alpha of `draft` on contexts with stored scores of the target, which need not be in memory.

    Counts what both surely give to the stored ids, so that alpha is never overstated; returned with
    it, by prompt [P]: the most that is missing, summed over positions (`alpha_bounds`). Shares are
    of all tokens in the position of the one that came. tails_known: the mass of all other ids was
    taken of the whole law; else it is bounded, as an engine tells the ids alone. Raises
    ValueError under a repetition penalty, of which stored scores know nothing.
    """
    device, totals, missing, shares = draft.device, [], [], []
    for first in range(0, len(contexts), batch_size):
        chunk = contexts[first : first + batch_size]
        read = [one.features for one in chunk if one.features is not None and draft.reads]
        features = pad_sequence(read, batch_first=True).to(device) if read else None
        laws = proposed_laws(draft, chunk, sampling, features=features)
        for context, positions in zip(chunk, laws, strict=True):
            served = sampling or sampling_of(context)
            if served.repetition_penalty != 1:
                raise ValueError(
                    "generate.top_k: stored scores do not know a repetition penalty: use"
                    " generate.top_k=0"
                )
            ids, temperature = torch.tensor(context.topk_ids, device=device), served.temperature
            log_probs = torch.tensor(context.topk_log_probs, device=device)
            tails = [torch.tensor(context.tail_mass, device=device)] * 2
            if not tails_known:
                bounds = tail_bounds(log_probs, temperature or 1.0, draft.vocab_size)
                tails = [one.to(log_probs) for one in bounds]
            # Both ends on one scale, that of the kept ids, whatever lies outside them.
            least, most = (
                coarse_target(
                    log_probs,
                    tail,
                    temperature=temperature or 1.0,
                    top_k=served.top_k if temperature > 0 else 1,
                    top_p=served.top_p if temperature > 0 else 1.0,
                    least=least,
                )
                - torch.log1p(-tail)[:, None]
                for tail, least in zip(tails, (True, False), strict=True)
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
    scored = _by_prompt(contexts, {"alpha": totals}, shares={"alpha": shares})
    return scored, torch.tensor(missing, dtype=torch.float64)


def estimates(scored: PromptTotals) -> dict[str, Estimate]:
    """Mean and interval of each mode."""
    return {mode: proportion(scored.rate(mode)) for mode in scored.totals}


def breakdown(scored: PromptTotals) -> dict[str, list[dict[str, Any]]]:
    """Where 1 - alpha is lost: by `entropy`, `position` and, where there are several, `category`.

    Of each part that has tokens its name (`part`), its share of the `tokens`, `alpha` there, and
    how much of 1 - alpha is `lost` there: these sum to it. Intervals are over documents, for parts
    that `LEAST_UNITS` of them have tokens in: what few of many documents lose is skewed, and an
    interval over all of them holds it too rarely.
    """
    accepted = torch.cat(scored.accepted)
    texts = torch.arange(len(scored.counts)).repeat_interleave(scored.counts.long())
    positions = torch.cat([torch.arange(1, len(one) + 1) for one in scored.accepted])
    # The number of the part of each token, and the names of all parts.
    parts: dict[str, tuple[Tensor, Sequence[str]]] = {}
    for by, values, named in (
        ("entropy", torch.cat(scored.entropies), ENTROPIES),
        ("position", positions, POSITIONS),
    ):
        starts = torch.tensor([*named][1:]).double()
        parts[by] = torch.bucketize(values.double(), starts, right=True), [*named.values()]
    if len(common := [name for name, _ in Counter(scored.domains).most_common()]) > 1:
        numbers = torch.tensor([min(common.index(one), CATEGORIES) for one in scored.domains])
        parts["category"] = numbers[texts], [*common[:CATEGORIES], OTHERS]

    def by_prompt(of_tokens: Tensor) -> Tensor:
        return torch.zeros_like(scored.counts).index_add(0, texts, of_tokens)

    rows: dict[str, list[dict[str, Any]]] = {by: [] for by in parts}
    for by, (part, names) in parts.items():
        for number, name in enumerate(names):
            inside = (part == number).double()
            if inside.any():
                tokens, lost = by_prompt(inside), by_prompt(inside * (1 - accepted))
                alpha = proportion(Rate(tokens - lost, tokens, scored.documents))
                loss = proportion(Rate(lost, scored.counts, scored.documents)).as_dict()
                row = {"part": name, "tokens": float(inside.mean()), "alpha": alpha.as_dict()}
                rows[by].append(row | {"lost": loss | ({} if alpha.ci95 else {"ci95": None})})
    return rows
