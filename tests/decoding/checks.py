"""The law of a decoder, checked from outside. Each check raises LawBroken when it fails.

`check_law` is the one instrument: `test_exactness.py` demands it of the shipped decoder over all
settings, and `test_mutants.py` shows that it rejects each broken decoder of `mutants.py`. What is
right comes from the tables, through the logits processors of transformers, not from draftkit.
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
from tests.decoding.measuring import Cells, Rows, measure, one_of_each
from tests.tabular import TabularAdapter, random_adapter, relative
from tests.theory.laws import START, LawBroken, check_sample, pair_laws, sequences

VOCAB_SIZE = 3
PROMPT = (1, 0)
TOLERANCE = 1e-10
CHUNK = 20_000  # rows that are decoded at once
Made = Callable[[TabularAdapter], Proposer]
Text = tuple[int, ...]

PLAIN = SamplingConfig()
CUT = SamplingConfig(temperature=0.7, top_k=2)
NUCLEUS = SamplingConfig(top_p=0.8)
PENALTY = SamplingConfig(repetition_penalty=1.5)
ALL = SamplingConfig(temperature=0.9, top_k=2, top_p=0.95, repetition_penalty=1.3)
GREEDY = SamplingConfig(temperature=0.0)
EVERY = (PLAIN, CUT, NUCLEUS, PENALTY, ALL, GREEDY)


@dataclass(frozen=True)
class Setting:
    """One decoding problem, small enough to enumerate; rows of each sampling share a batch."""

    gamma: int = 2
    verification: str = "speculative"
    samplings: tuple[SamplingConfig, ...] = (PLAIN,)
    eos: tuple[int, ...] = ()
    tokens: int = 3  # of which the joint law is enumerated
    seed: int = 5

    @cached_property
    def target(self) -> TabularAdapter:
        return random_adapter(VOCAB_SIZE, self.seed)

    def draft(self, seed: int = 100) -> TabularAdapter:
        """A new copy: weights may be swapped."""
        return relative(self.target, self.seed + seed)

    def request(self, which: int, text: Text) -> Request:
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

    def laws(self, model: TabularAdapter, tokens: int) -> list["TextLaw"]:
        """Of texts of up to `tokens` tokens under `model`, by sampling."""
        return [TextLaw(model, sampling, tokens) for sampling in self.samplings]


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

    def __call__(self, text: Text, before: Text) -> float:
        """The probability of `text`, given that it begins with `before`."""
        law = 1.0
        for n in range(len(before), len(text)):
            law *= self._next[text[:n]][text[n]]
        return law


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


def in_turn(setting: Setting) -> Callable[[int, Text, Text], float]:
    """The law of proposals by sampling, text and block: each knows those before it."""
    laws = setting.laws(setting.draft(), setting.tokens + setting.gamma)
    return lambda which, text, block: laws[which](text + block, text)


@dataclass(frozen=True)
class Parts:
    """What a decoder is built of; mutants replace one of them.

    proposals: their law, where it is known.
    """

    decoder: type[Decoder] = Decoder
    proposer: Made = DraftModelProposer
    verifier: Verifier | None = None
    noise: NoiseFunction = noise.uniform
    proposals: Callable[[Setting], Callable[[int, Text, Text], float]] | None = None


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
    proposer = parts.proposer(draft)
    decoder = parts.decoder(
        target,
        slots=len(requests),
        capacity=max(tokens_needed(request, proposer.tree) for request in requests),
        eos_token_ids=eos,
        verification=verification,
        epsilon=0.3 if verification == "typical" else None,
        noise_function=parts.noise,
    )
    if parts.verifier is not None:
        decoder.verifier = parts.verifier
    decoder.attach(DRAFT_ID, proposer)
    decoder.join(requests)
    while decoder.prefill():
        pass
    return decoder


@dataclass(frozen=True)
class Measured:
    """A round from each of some texts: the rows, and the sampling (a number) and text of each."""

    setting: Setting
    rows: Rows
    texts: list[tuple[int, Text]]

    @cached_property
    def cells(self) -> Cells:
        """What a round does in every cell of its uniforms."""
        return measure(self.rows)

    def law(self, of: str) -> list[dict[Text, float]]:
        """By row, the law of a field of `Outcome` that holds tokens; -1 is none."""
        laws: list[dict[Text, float]] = [defaultdict(float) for _ in self.texts]
        cells = self.cells
        blocks = getattr(cells.outcome, of).tolist()
        for row, mass, block in zip(cells.state.tolist(), cells.mass.tolist(), blocks, strict=True):
            laws[row][tuple(token for token in block if token >= 0)] += mass
        return laws

    def left(self, rows: Rows, row: Tensor) -> tuple[Tensor, list[tuple[int, Text]]]:
        """Those of `rows`, after a round from `row` [N], that go on, and the texts they have.

        One for each that differs in sampling or in what was written, proposals included.
        """
        going_on = (~rows.state.done).nonzero()[:, 0]
        which = torch.tensor([which for which, _ in self.texts])[row[going_on]]
        example, _ = one_of_each(torch.cat([which[:, None], rows.state.tokens[going_on]], dim=1))
        which, going_on = which[example], going_on[example]
        written = zip(rows.state.tokens[going_on], rows.state.length[going_on], strict=True)
        texts = [tuple(text[len(PROMPT) : length].tolist()) for text, length in written]
        return going_on, [*zip(which.tolist(), texts, strict=True)]


def measured(parts: Parts, setting: Setting, texts: Sequence[Text] | None = None) -> Measured:
    """Measure a round from every text of the setting under every sampling, freshly fed."""
    samplings = range(len(setting.samplings))
    every = [(which, text) for which in samplings for text in texts or setting.prefixes]
    decoder = build(
        parts,
        [setting.request(*one) for one in every],
        target=setting.target,
        draft=setting.draft(),
        verification=setting.verification,
        eos=setting.eos,
    )
    return Measured(setting, Rows(decoder), every)


def check_joint_law(result: Measured) -> None:
    """Every round, continued by the target, has the target's law; a row is done if its text is.

    So all texts, of a few tokens or to the first end of text, have the target's joint law.
    """
    setting, outcome = result.setting, result.cells.outcome
    cells = zip(
        result.cells.state.tolist(), outcome.text.tolist(), outcome.done.tolist(), strict=True
    )
    for row, text, done in cells:
        longer = result.texts[row][1] + tuple(token for token in text if token >= 0)
        if done != setting.is_done(longer):
            raise LawBroken(f"{longer} is {'done' if done else 'not done'}")
    laws = setting.laws(setting.target, setting.tokens)
    for (which, text), committed in zip(result.texts, result.law("text"), strict=True):
        law: dict[Text, float] = defaultdict(float)
        whole = [one for one in setting.whole if one[: len(text)] == text]
        for new, mass in committed.items():
            for one in whole:
                if one[len(text) :][: len(new)] == new:
                    law[one] += mass * laws[which](one, text + new)
        error = max(abs(law[one] - laws[which](one, text)) for one in whole)
        if not error <= TOLERANCE:
            raise LawBroken(f"after {text}: joint law is off by {error:.3g}")


def check_proposals(result: Measured, law: Callable[[int, Text, Text], float]) -> None:
    """Proposals have the law that is known of them, given the text and those before them."""
    blocks = [tuple(block) for block in sequences(VOCAB_SIZE, result.setting.gamma).tolist()]
    for (which, text), found in zip(result.texts, result.law("draft_tokens"), strict=True):
        for block in blocks:
            if abs(law(which, text, block) - found[block]) > TOLERANCE:
                raise LawBroken(f"after {text}, {block} is proposed with another probability")


def check_text_alone(result: Measured, *, levels: int = 3, most: int = 60_000) -> None:
    """A round's law depends on the text, not on the rounds that made it.

    From the bare prompt all outcomes of a round are played, from each of the states so reached
    all outcomes of the next, and so on (a random part of them where they are more than `most`),
    with noise next to the corners of each cell: the outcomes must be those that were measured from
    the same text, freshly fed.
    """
    generator = torch.Generator().manual_seed(1)
    cells, rows = result.cells, result.rows
    per_state = torch.bincount(cells.state)
    first = per_state.cumsum(0) - per_state
    numbers = {text: number for number, text in enumerate(result.texts)}
    row = number = torch.tensor([n for (_, text), n in numbers.items() if text == ()])
    for _ in range(levels):
        count = per_state[number]
        parent = torch.arange(len(row)).repeat_interleave(count)
        cell = torch.arange(len(parent)) + (first[number] - count.cumsum(0) + count)[parent]
        pick = torch.randperm(len(parent), generator=generator)[:most]
        parent, cell = parent[pick], cell[pick]
        corners = cells.boxes.somewhere(generator, at_edges=True)
        rows = rows.take(row[parent]).force(corners[cell])
        odd = rows.outcome().differs(cells.outcome.at(cell))
        if (odd & (cells.mass[cell] > 1e-9)).any():
            raise LawBroken("a round depends on more than the text before it")
        row, texts = result.left(rows, number[parent])
        number = torch.tensor([numbers[text] for text in texts], dtype=torch.long)
        some = torch.randperm(len(row), generator=generator)[:1500]
        row, number = row[some], number[some]
        if not len(row):
            break


def check_law(parts: Parts, setting: Setting) -> Measured:
    """All that enumeration can say of a decoder."""
    result = measured(parts, setting)
    check_joint_law(result)
    if parts.proposals is not None:
        check_proposals(result, parts.proposals(setting))
    check_text_alone(result)
    return result


def check_swapped(parts: Parts, setting: Setting) -> None:
    """New draft weights after the first round, met by caches of the old ones, change no law."""
    before = measured(parts, setting, [()])
    rows = before.rows.take(before.cells.state).force(before.cells.boxes.middle)
    rows.outcome()
    row, texts = before.left(rows, before.cells.state)
    rows = rows.take(row)
    assert rows.proposer is not None
    rows.proposer.swap(setting.draft(seed=200).state_dict(), "new")
    check_joint_law(Measured(setting, rows, texts))


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
    one = build(parts, [request], target=target, draft=draft, verification=verification)
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
