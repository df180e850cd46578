"""Whole completions: requests in, token ids and counts out, by looping over the decoder's rounds.

Knows no clock and no text; whoever wants times drives the decoder itself, as this module does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder, RoundResult, tokens_needed
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.state import Request
from draftkit.models.adapter import Adapter

DRAFT_ID = "draft"
LIKELIEST = ("topk_ids", "topk_log_probs", "tail_mass")  # of the target, where a decoder names some
Watch = Callable[[float, int], None]  # hears how many answers are done, parts counted, and tokens


@dataclass(frozen=True)
class TraceRound:
    """One round of one row."""

    proposed: list[int]
    accepted: int  # of `proposed`, those that were emitted
    next_token: int | None  # correction or bonus; None: an end of text came before
    committed: int  # of the emitted tokens, those within the length limit

    @property
    def emitted(self) -> list[int]:
        """What the target pass yielded."""
        own = [] if self.next_token is None else [self.next_token]
        return self.proposed[: self.accepted] + own

    @property
    def fates(self) -> list[str]:
        """What became of every emitted token, a key of `trace.SHOWN`."""
        own = "bonus" if self.accepted == len(self.proposed) else "correction"
        return (["accepted"] * self.accepted + [own])[: len(self.emitted)]


@dataclass
class Completion:
    """One answer and what decoding it showed."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    ended: bool = False  # by an end-of-text id; else by the length limit
    accept_counts: list[int] = field(default_factory=list)  # rounds with 0..gamma accepted
    acceptance_total: float = 0.0  # sum over tested positions of the chance to be accepted
    drafted: int = 0  # proposals
    tested: int = 0  # of them, those that were put to the test
    steps: list[TraceRound] = field(default_factory=list)
    # Beside each token of the answer, as `RoundResult` has them; empty where none are named.
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_log_probs: list[list[float]] = field(default_factory=list)
    tail_mass: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return sum(self.accept_counts)

    @property
    def accepted(self) -> int:
        return sum(n * count for n, count in enumerate(self.accept_counts))

    def recorded(self, *, likeliest: bool = False, proposals: bool = False) -> dict[str, Any]:
        """What a record holds of the answer: its ids and, beside each, what is asked for.

        proposals: what was proposed in a token's place (-1: nothing, as for a bonus), and if it was
        refused. Proposals behind a refused one were never tested, and belong to another text.
        """
        values: dict[str, Any] = {"output_ids": self.output_ids}
        if likeliest:
            values |= {name: getattr(self, name) for name in LIKELIEST}
        if proposals:
            tokens = [(step, index) for step in self.steps for index in range(step.committed)]
            values["proposals"] = [
                step.proposed[index] if index < len(step.proposed) else -1 for step, index in tokens
            ]
            values["rejected"] = [
                step.accepted <= index < len(step.proposed) for step, index in tokens
            ]
        count = len(self.output_ids)  # what a stop string has cut off the answer is not recorded
        return {name: value[:count] for name, value in values.items()}


def trace_round(
    tokens: list[int], draft_tokens: list[int], emitted: int, committed: int, gamma: int
) -> TraceRound:
    """Read one row of a round: `tokens` [K + 1], `draft_tokens` [K], `gamma` real proposals.

    The last emitted token is the target's own unless it is the proposal of its position: a
    correction never is, so an end of text was proposed, accepted, and ended the row.
    """
    last = emitted - 1
    proposed = draft_tokens[:gamma]
    if last < gamma and tokens[last] == proposed[last]:
        return TraceRound(proposed, emitted, None, committed)
    return TraceRound(proposed, last, tokens[last], committed)


def record(completions: dict[int, Completion], result: RoundResult) -> list[int]:
    """Add a round to `completions` (by slot); return the slots that are done.

    A round counts with what it emitted up to an end of text; tokens cut by the length limit alone
    were lawful, so they count too, though they are not part of the answer.
    """
    tokens = result.tokens.tolist()
    proposed = result.draft_tokens.tolist()
    acceptance = result.acceptance.tolist()
    parts = {
        name: part.tolist() for name in LIKELIEST if (part := getattr(result, name)) is not None
    }
    finished = []
    for row, (slot, tested) in enumerate(zip(result.slots, result.tested, strict=True)):
        completion = completions[slot]
        emitted, committed, n = result.emitted[row], result.committed[row], result.lengths[row]
        completion.output_ids += tokens[row][:committed]
        for name, part in parts.items():
            getattr(completion, name).extend(part[row][:committed])
        completion.steps.append(trace_round(tokens[row], proposed[row], emitted, committed, n))
        completion.accept_counts += [0] * (result.gamma + 1 - len(completion.accept_counts))
        completion.accept_counts[emitted - 1] += 1
        completion.drafted += n
        completion.tested += tested
        completion.acceptance_total += sum(acceptance[row][:tested])
        if result.done[row]:
            completion.ended = result.ended[row]
            finished.append(slot)
    return finished


def finish(
    decoder: Decoder, requests: Sequence[Request], watch: Watch | None = None
) -> list[Completion]:
    """Decode `requests`, as many at once as `decoder` has free slots; answers in their order."""
    answers = [Completion(list(request.prompt_ids)) for request in requests]
    waiting, running = [*range(len(requests))], dict[int, Completion]()
    limits = dict[int, int]()  # of the answers in the slots
    while waiting or running:
        joining = [waiting.pop(0) for _ in range(min(len(waiting), decoder.free_slots))]
        slots = decoder.join([requests[number] for number in joining])
        running |= zip(slots, [answers[number] for number in joining], strict=True)
        limits |= zip(slots, [requests[number].max_new_tokens for number in joining], strict=True)
        for result in decoder.round():
            done = record(running, result)
            decoder.leave(done)
            for slot in done:
                del running[slot]
        if watch is not None:
            parts = sum(len(one.output_ids) / limits[slot] for slot, one in running.items())
            watch(
                len(answers) - len(waiting) - len(running) + parts,
                sum(len(one.output_ids) for one in answers),
            )
    return answers


def decode(
    target: Adapter,
    requests: Sequence[Request],
    *,
    eos_token_ids: Sequence[int],
    batch_size: int,
    proposer: Proposer | None = None,
    verification: str = "speculative",
    epsilon: float | None = None,
    top_k: int = 0,
    watch: Watch | None = None,
) -> list[Completion]:
    """Decode all `requests` on a decoder made to their measure; `proposer` has id `DRAFT_ID`."""
    if not requests:
        return []
    tree = None if proposer is None else proposer.tree
    decoder = Decoder(
        target,
        slots=min(batch_size, len(requests)),
        capacity=max(tokens_needed(request, tree) for request in requests),
        eos_token_ids=eos_token_ids,
        verification=verification,
        epsilon=epsilon,
        top_k=top_k,
    )
    if proposer is not None:
        decoder.attach(DRAFT_ID, proposer)
    return finish(decoder, requests, watch)


def make_requests(
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    gamma: int = 0,
    seed: int = 0,
    first_row: int = 0,
    max_length: int | None = None,
) -> Iterator[Request]:
    """One request a prompt, numbered from `first_row`; `max_length` bounds prompt and answer."""
    for row, prompt in enumerate(prompts, start=first_row):
        room = max_new_tokens if max_length is None else max_length - len(prompt)
        yield Request(
            prompt_ids=prompt,
            max_new_tokens=min(max_new_tokens, room),
            sampling=sampling,
            gamma=gamma,
            proposer_id=DRAFT_ID if gamma > 0 else None,
            seed=seed,
            row=row,
        )
