"""What our decoder counts of its rounds, as an engine counts its passes.

A pass is one pass of the target over proposals; the pass that reads the prompt yields a first token
of its own, before any proposal. A pass in which a text ends counts whole, also what is accepted
behind the end. `capped` engines make no proposals that the length limit would cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import Proposer
from draftkit.models.adapter import Adapter


@dataclass(frozen=True)
class Answer:
    """One answer, and how many proposals each of its passes accepted."""

    ids: list[int]
    accepted: list[int]

    def at_least(self, count: int) -> int:
        """How many passes accepted so many proposals."""
        return sum(one >= count for one in self.accepted)


def accepted_by_pass(
    completion: Completion, *, limit: int, ends: Sequence[int], capped: bool
) -> list[int]:
    """How many proposals each pass accepted, of those that begin before an end of text.

    completion: decoded without regard to `ends`, to at least `limit` tokens.
    """
    counts, length = [], 0
    for step in completion.steps:
        if length >= limit:
            break
        accepted = min(step.accepted, limit - length - 1) if capped else step.accepted
        counts.append(accepted)
        length += accepted + 1
        if {*ends} & {*step.emitted[: accepted + 1]}:
            break
    return counts


@dataclass(frozen=True, kw_only=True)
class OurDecoder:
    """draftkit's decoder, counted as an engine counts itself."""

    target: Adapter
    proposer: Proposer
    ends: Sequence[int]
    gamma: int
    capped: bool

    def answer(self, prompt: Sequence[int], *, temperature: float, limit: int, seed: int) -> Answer:
        """Continue the prompt by `limit` tokens, or to an end of text."""
        sampling = SamplingConfig(temperature=temperature)
        (first,) = self._decode(prompt, 1, sampling, seed, None).output_ids
        if first in self.ends:
            return Answer([first], [])
        whole = self._decode([*prompt, first], limit - 1, sampling, seed, self.proposer)
        ids = [first, *whole.output_ids]
        end = next((number for number, token in enumerate(ids, 1) if token in self.ends), None)
        counts = accepted_by_pass(whole, limit=limit - 1, ends=self.ends, capped=self.capped)
        return Answer(ids[:end], counts)

    def _decode(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: SamplingConfig,
        seed: int,
        proposer: Proposer | None,
    ) -> Completion:
        gamma = 0 if proposer is None else self.gamma
        requests = make_requests(
            [prompt], max_new_tokens=count, sampling=sampling, gamma=gamma, seed=seed
        )
        (done,) = decode(
            self.target, [*requests], eos_token_ids=(), batch_size=1, proposer=proposer
        )
        return done
