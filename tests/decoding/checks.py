"""The named checks of a decoder. Each raises LawBroken when its property fails.

`test_exactness.py` demands them of the shipped decoder over all settings; `test_mutants.py` shows
that each broken decoder of `mutants.py` fails one of them. What is right comes from the tables,
through the logits processors of transformers, not from draftkit.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder, tokens_needed
from draftkit.decoding.generation import DRAFT_ID
from draftkit.decoding.proposers import DraftModelProposer, Proposer
from draftkit.decoding.state import NoiseFunction, Request
from draftkit.theory import noise
from draftkit.theory.verification import Verifier
from tests.decoding.measuring import Cells, Rows, measure
from tests.tabular import TabularAdapter, random_adapter, relative
from tests.theory.laws import START, LawBroken, check_sample, pair_laws, sequences

VOCAB_SIZE = 3
PROMPT = (1, 0)
TOLERANCE = 1e-10
CHUNK = 20_000  # rows that are decoded at once
Made = Callable[[TabularAdapter], Proposer]
Text = tuple[int, ...]
Mass = defaultdict[Text, float]  # probability by text


@dataclass(frozen=True)
class Parts:
    """What a decoder is built of; mutants replace one of them."""

    decoder: type[Decoder] = Decoder
    proposer: Made = DraftModelProposer
    verifier: Verifier | None = None
    noise: NoiseFunction = noise.uniform


@dataclass(frozen=True)
class Setting:
    """One decoding problem, small enough to enumerate; rows of each sampling share a batch."""

    gamma: int = 2
    verification: str = "speculative"
    samplings: tuple[SamplingConfig, ...] = (SamplingConfig(),)
    eos: tuple[int, ...] = ()
    tokens: int = 4  # of which the joint law is enumerated
    seed: int = 5

    @cached_property
    def target(self) -> TabularAdapter:
        return random_adapter(VOCAB_SIZE, self.seed)

    def draft(self, seed: int = 100) -> TabularAdapter:
        """A new copy: weights may be swapped."""
        return relative(self.target, self.seed + seed)

    def request(self, text: Text, which: int = 0) -> Request:
        """The request that goes on after `text`, as if it were part of the prompt."""
        return Request(
            prompt_ids=[*PROMPT, *text],
            max_new_tokens=self.tokens - len(text),
            sampling=self.samplings[which],
            gamma=self.gamma,
            proposer_id=DRAFT_ID if self.gamma else None,
        )

    def is_done(self, text: Text) -> bool:
        return len(text) == self.tokens or (len(text) > 0 and text[-1] in self.eos)

    @cached_property
    def prefixes(self) -> list[Text]:
        """All texts that go on, the shortest first."""
        every = [tuple(t) for n in range(self.tokens) for t in sequences(VOCAB_SIZE, n).tolist()]
        return [text for text in every if not set(text) & set(self.eos)]

    @cached_property
    def whole(self) -> list[Text]:
        """All texts that are done."""
        longer = [(*text, last) for text in self.prefixes for last in range(VOCAB_SIZE)]
        return [text for text in longer if self.is_done(text)]


def build(
    parts: Parts,
    requests: Sequence[Request],
    *,
    target: TabularAdapter,
    draft: TabularAdapter,
    verification: str = "speculative",
    eos: Sequence[int] = (),
) -> Decoder:
    """A decoder of those parts with `requests` joined and their prompts fed."""
    decoder = parts.decoder(
        target,
        slots=len(requests),
        capacity=max(map(tokens_needed, requests)),
        eos_token_ids=eos,
        verification=verification,
        noise_function=parts.noise,
    )
    if parts.verifier is not None:
        decoder.verifier = parts.verifier
    decoder.attach(DRAFT_ID, parts.proposer(draft))
    decoder.join(requests)
    while decoder.prefill():
        pass
    return decoder


def served(model: TabularAdapter, texts: Tensor, sampling: SamplingConfig) -> Tensor:
    """The law after each of `texts` [N, L], by the processors of transformers: [N, V]."""
    ids: Any = texts
    scores: Any = model.logits(texts)[:, -1]
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).double()
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    return scores.softmax(-1)


class TextLaw:
    """The probability of continuations under a served model."""

    def __init__(self, model: TabularAdapter, sampling: SamplingConfig, tokens: int) -> None:
        self._next: dict[Text, list[float]] = {}
        for length in range(tokens):
            texts = sequences(VOCAB_SIZE, length)
            prompts = torch.tensor(PROMPT).expand(len(texts), -1)
            law = served(model, torch.cat([prompts, texts], dim=1), sampling)
            keys = map(tuple, texts.tolist())
            self._next |= dict(zip(keys, law.tolist(), strict=True))

    def __call__(self, text: Text, before: Text = ()) -> float:
        """The probability of `text`, given that it begins with `before`."""
        law = 1.0
        for n in range(len(before), len(text)):
            law *= self._next[text[:n]][text[n]]
        return law


@dataclass(frozen=True)
class Measured:
    """The rounds of a setting from every text under every sampling, freshly fed."""

    setting: Setting
    rows: Rows
    cells: Cells

    def number(self, text: Text, which: int = 0) -> int:
        """The row that goes on after `text`."""
        return which * len(self.setting.prefixes) + self.setting.prefixes.index(text)


def rows_of(parts: Parts, setting: Setting, requests: Sequence[Request]) -> Rows:
    """Rows of a decoder of the setting, ready for their first round."""
    decoder = build(
        parts,
        requests,
        target=setting.target,
        draft=setting.draft(),
        verification=setting.verification,
        eos=setting.eos,
    )
    return Rows(decoder)


def measured(parts: Parts, setting: Setting) -> Measured:
    """Measure a round of the decoder from every text of the setting."""
    every = [setting.request(t, n) for n in range(len(setting.samplings)) for t in setting.prefixes]
    rows = rows_of(parts, setting, every)
    return Measured(setting, rows, measure(rows))


def round_law(cells: Cells, state: int) -> Mass:
    """The law of what a round from `state` commits."""
    law: Mass = defaultdict(float)
    mine = (cells.state == state).nonzero()[:, 0]
    texts = cells.outcome.text[mine].tolist()
    for mass, row in zip(cells.mass[mine].tolist(), texts, strict=True):
        law[tuple(token for token in row if token >= 0)] += mass
    return law


def _compare(law: Mass, own: dict[Text, float], where: str) -> None:
    if unlawful := [text for text in law if text not in own]:
        raise LawBroken(f"{where}: texts that cannot be: {unlawful[:3]}")
    error = max(abs(law[text] - own[text]) for text in own)
    if not error <= TOLERANCE:
        raise LawBroken(f"{where}: joint law is off by {error:.3g} (tolerance {TOLERANCE:.0e})")


def check_joint_law(result: Measured) -> None:
    """All texts, of a few tokens or to the first end of text, have the target's joint law."""
    setting = result.setting
    check_ends(result)
    for which, sampling in enumerate(setting.samplings):
        complete: dict[Text, Mass] = {}
        for text in reversed(setting.prefixes):  # the longest first
            complete[text] = defaultdict(float)  # of texts that are done, or cannot be
            law = round_law(result.cells, result.number(text, which))
            for committed, mass in law.items():
                longer = text + committed
                rest = complete.get(longer, {longer: 1.0})
                for whole, conditional in rest.items():
                    complete[text][whole] += mass * conditional
        own = TextLaw(setting.target, sampling, setting.tokens)
        _compare(complete[()], {text: own(text) for text in setting.whole}, str(sampling))


def check_ends(result: Measured) -> None:
    """A row is done if its text is done, and not before."""
    setting, outcome = result.setting, result.cells.outcome
    states = (result.cells.state % len(setting.prefixes)).tolist()
    for state, row, done in zip(states, outcome.text.tolist(), outcome.done.tolist(), strict=True):
        text = setting.prefixes[state] + tuple(token for token in row if token >= 0)
        if done != setting.is_done(text):
            raise LawBroken(f"{text} is {'done' if done else 'not done'}")


def check_proposal_law(result: Measured) -> None:
    """Proposals have the served law of the draft, given the text and the proposals before."""
    setting, cells = result.setting, result.cells
    law: defaultdict[tuple[int, Text], float] = defaultdict(float)
    blocks = cells.outcome.draft_tokens.tolist()
    for state, mass, block in zip(cells.state.tolist(), cells.mass.tolist(), blocks, strict=True):
        law[state, tuple(block)] += mass
    for which, sampling in enumerate(setting.samplings):
        own = TextLaw(setting.draft(), sampling, setting.tokens + setting.gamma)
        for text in setting.prefixes:
            number = result.number(text, which)
            for block in map(tuple, sequences(VOCAB_SIZE, setting.gamma).tolist()):
                if abs(own(text + block, before=text) - law[number, block]) > TOLERANCE:
                    raise LawBroken(f"after {text}, {block} is proposed with another probability")


def check_text_alone(result: Measured, *, levels: int = 3, most: int = 60_000) -> int:
    """A round's law depends on the text, not on the rounds that made it; returns the cases tried.

    From the bare prompt all outcomes of a round are played, from each of the states so reached
    all outcomes of the next, and so on (a random part of them where they are more than `most`),
    with noise next to the corners of each cell: the outcomes must be those that were measured from
    the same text, freshly fed.
    """
    generator = torch.Generator().manual_seed(1)
    cells, rows = result.cells, result.rows
    per_state = torch.bincount(cells.state)
    first = per_state.cumsum(0) - per_state
    row = number = torch.tensor(
        [result.number((), which) for which in range(len(result.setting.samplings))]
    )
    tried = 0
    for _ in range(levels):
        count = per_state[number]
        parent = torch.arange(len(row)).repeat_interleave(count)
        cell = torch.arange(len(parent)) + (first[number] - count.cumsum(0) + count)[parent]
        if len(parent) > most:
            pick = torch.randperm(len(parent), generator=generator)[:most]
            parent, cell = parent[pick], cell[pick]
        corners = cells.boxes.somewhere(generator, at_edges=True)
        rows = rows.take(row[parent]).force(corners[cell])
        odd = rows.outcome().differs(cells.outcome.at(cell))
        if (odd & (cells.mass[cell] > 1e-9)).any():
            raise LawBroken("a round depends on more than the text before it")
        tried += len(parent)
        row, number = _new_states(rows, number[parent], result)
        if not len(row):
            break
    return tried


def _texts_of(rows: Rows) -> dict[Text, tuple[int, Text]]:
    """Of rows that go on, one for each that differs in what was written, proposals included.

    By that: the row, and its text behind the prompt.
    """
    state = rows.state
    going_on = (~state.done).nonzero()[:, 0].tolist()
    written, lengths = state.tokens.tolist(), state.length.tolist()
    return {
        tuple(written[row]): (row, tuple(written[row][len(PROMPT) : lengths[row]]))
        for row in reversed(going_on)
    }


def _new_states(
    rows: Rows, before: Tensor, result: Measured, most: int = 1500
) -> tuple[Tensor, Tensor]:
    """Rows that go on and differ in text or proposals, and the rows of their texts.

    before: those [N] of the texts that they went on from, under the same sampling.
    """
    texts, found = len(result.setting.prefixes), dict[tuple[int, Text], tuple[int, int]]()
    for which in range(len(result.setting.samplings)):
        mine = (before // texts == which).nonzero()[:, 0]
        for written, (row, text) in _texts_of(rows.take(mine)).items():
            found[which, written] = int(mine[row]), result.number(text, which)
    kept = [*found.values()]
    kept = kept[:: max(1, -(-len(kept) // most))]
    return torch.tensor([k[0] for k in kept]).long(), torch.tensor([k[1] for k in kept]).long()


def check_swapped(parts: Parts, setting: Setting) -> None:
    """New draft weights after the first round, met by caches of the old ones, change no law.

    Every state that the first round can leave is continued by a measured round of the new draft,
    and then by the target.
    """
    rows = rows_of(parts, setting, [setting.request(())])
    before = measure(rows)
    left = rows.take(before.state).force(before.boxes.middle)
    left.outcome()
    kept = [*_texts_of(left).values()]
    rows = left.take(torch.tensor([row for row, _ in kept]))
    assert rows.proposer is not None
    rows.proposer.swap(setting.draft(seed=200).state_dict(), "new")
    after, texts = measure(rows), {row: text for row, (_, text) in enumerate(kept)}
    own = TextLaw(setting.target, setting.samplings[0], setting.tokens)
    for row, text in texts.items():
        whole = [t for t in setting.whole if t[: len(text)] == text]
        law: Mass = defaultdict(float)
        for committed, mass in round_law(after, row).items():
            longer = text + committed
            for full in whole:
                if full[: len(longer)] == longer:
                    law[full] += mass * own(full, before=longer)
        _compare(law, {full: own(full, before=text) for full in whole}, f"after {text}")


def check_sampled(
    parts: Parts,
    tables: tuple[Tensor, Tensor],
    *,
    rows: int,
    verification: str = "speculative",
    sampling: SamplingConfig | None = None,
    tokens: int = 6,
    gamma: int = 3,
    seed: int = 0,
    level: float = 1e-3,
) -> dict[tuple[int, int], float]:
    """With real noise, over several rounds, positions and pairs have the target's law.

    tables: probabilities [V, V, V] of target and draft by the last two tokens. Returns the p-values
    by position and pair.
    """
    sampling = sampling or SamplingConfig()
    target, draft = (TabularAdapter(torch.cat([t, t[:1]]).double().log()) for t in tables)
    request = Request(
        prompt_ids=START,
        max_new_tokens=tokens,
        sampling=sampling,
        gamma=gamma,
        proposer_id=DRAFT_ID,
        seed=seed,
    )
    one = build(
        parts,
        [request],
        target=target,
        draft=draft,
        verification=verification,
    )
    sample = []
    for row in torch.arange(rows).split(CHUNK):
        some = Rows(one).take(torch.zeros_like(row))
        some.state.row = row
        while not some.state.done.all():
            some.play()
        sample.append(some.state.tokens[:, len(START) : len(START) + tokens])
    size = target.vocab_size
    law = served(target, sequences(size, 2), sampling).view(size, size, size)
    return check_sample(torch.cat(sample), pair_laws(law, tokens), level)
