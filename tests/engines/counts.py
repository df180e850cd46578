"""What an engine counts while it drafts, and what our decoder counts of the same, by prompt.

A pass is one pass of the target over proposals; tokens a pass of it are 1 + accepted / passes.
Engines differ in what they call a pass, so our decoder's rounds are counted as theirs are:

    first_alone   the pass that reads the prompt yields a token of its own, before any proposal
    capped        proposals that the length limit would cut off are not made

A pass in which a text ends counts whole, also what an engine accepts behind the end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import Proposer
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import Rate


@dataclass(frozen=True)
class Counting:
    """How an engine counts its passes; see the module's docstring."""

    first_alone: bool
    capped: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, and what was counted while it was written.

    seconds: from the request to the last token. by_position: how many passes accepted at least
    1, 2, ..., gamma proposals; None of an engine that does not count them.
    """

    ids: list[int]
    seconds: float = 0.0
    passes: int = 0
    accepted: int = 0
    by_position: list[int] | None = None


def accepted_by_pass(
    completion: Completion, *, limit: int, ends: Iterable[int], capped: bool
) -> list[int]:
    """How many proposals each pass accepted, of those that begin before an end of text.

    completion: decoded without regard to `ends`, to at least `limit` tokens.
    """
    ends, counts, length = {*ends}, [], 0
    for step in completion.steps:
        if length >= limit:
            break
        accepted = min(step.accepted, limit - length - 1) if capped else step.accepted
        counts.append(accepted)
        length += accepted + 1
        if ends & {*step.emitted[: accepted + 1]}:
            break
    return counts


def cut_at_end(ids: Sequence[int], ends: Iterable[int]) -> list[int]:
    """`ids` up to the first end of text, which belongs to them."""
    ends = {*ends}
    end = next((number for number, token in enumerate(ids, 1) if token in ends), None)
    return list(ids[:end])


def answer_of(counts: Sequence[int], ids: list[int], gamma: int) -> Answer:
    """An answer from what each pass accepted."""
    at_least = [sum(count >= position for count in counts) for position in range(1, gamma + 1)]
    return Answer(ids=ids, passes=len(counts), accepted=sum(counts), by_position=at_least)


@dataclass(frozen=True, kw_only=True)
class OurDecoder:
    """draftkit's decoder, counted as an engine counts itself."""

    target: Adapter
    proposer: Proposer
    ends: Sequence[int]
    gamma: int
    counting: Counting
    batch_size: int

    def answers(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, limit: int, seed: int
    ) -> list[Answer]:
        """Continue each prompt by `limit` tokens, or to an end of text."""
        sampling = SamplingConfig(temperature=temperature)
        first: list[list[int]] = [[] for _ in prompts]
        if self.counting.first_alone:
            first = self._plain(prompts, sampling, seed)
        begun = [[*prompt, *ids] for prompt, ids in zip(prompts, first, strict=True)]
        requests = make_requests(
            begun,
            max_new_tokens=limit - len(first[0]),
            sampling=sampling,
            gamma=self.gamma,
            seed=seed,
        )
        done = decode(
            self.target,
            [*requests],
            eos_token_ids=(),
            batch_size=self.batch_size,
            proposer=self.proposer,
        )
        return [self._answer(one, ids, limit) for one, ids in zip(done, first, strict=True)]

    def _plain(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seed: int
    ) -> list[list[int]]:
        """The first token of each answer. Its noise is that of no later token of the row."""
        requests = make_requests(prompts, max_new_tokens=1, sampling=sampling, seed=seed)
        done = decode(self.target, [*requests], eos_token_ids=(), batch_size=self.batch_size)
        return [one.output_ids for one in done]

    def _answer(self, completion: Completion, first: list[int], limit: int) -> Answer:
        ids = cut_at_end([*first, *completion.output_ids], self.ends)
        if first and {*first} & {*self.ends}:
            return Answer(ids=ids, by_position=[0] * self.gamma)
        counts = accepted_by_pass(
            completion, limit=limit - len(first), ends=self.ends, capped=self.counting.capped
        )
        return answer_of(counts, ids, self.gamma)


def summed(turns: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The counts of several turns over the same prompts, by prompt; ids are those of the first."""
    totals = []
    for answers in zip(*turns, strict=True):
        positions = [one.by_position for one in answers if one.by_position is not None]
        totals.append(
            replace(
                answers[0],
                seconds=sum(one.seconds for one in answers),
                passes=sum(one.passes for one in answers),
                accepted=sum(one.accepted for one in answers),
                by_position=[sum(at) for at in zip(*positions, strict=True)] or None,
            )
        )
    return totals


def tokens_a_pass(answers: Sequence[Answer]) -> Rate:
    """1 + accepted / passes, by prompt."""
    return Rate.of((one.passes + one.accepted, one.passes) for one in answers)


def accepted_at(answers: Sequence[Answer]) -> list[float] | None:
    """The share of passes that accepted at least 1, 2, ..., gamma proposals; None: not counted."""
    if any(one.by_position is None for one in answers):
        return None
    counted = torch.tensor([one.by_position for one in answers], dtype=torch.float64)
    return (counted.sum(0) / max(1, sum(one.passes for one in answers))).tolist()
