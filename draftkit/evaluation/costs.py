"""What a round costs by part: c, v and o of the speed-up formula, for evaluation and server.

In every pass rounds of each number of proposals answer batches as timed generations do, by the same
code, and are compared with the plain steps of that pass: what disturbs a machine for a while
disturbs all. They run on the decoders that are timed, or that will serve: two decoders of one model
need not be as fast, as their memory lies elsewhere. An evaluation calibrates on other prompts than
it times, so that the theory predicts from these costs and never from the generations that it
predicts. There all rounds are those of texts of the same lengths, since a step may cost more behind
a longer text. A server measures before the first job, which also makes the code and the buffers
that the first jobs need.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.generation import DRAFT_ID
from draftkit.decoding.results import RoundSeconds
from draftkit.evaluation.walltime import (
    MOST_GAMMA,
    PromptIds,
    Setting,
    Timed,
    synchronised_clock,
    timed_batch,
)
from draftkit.theory.speedup import Costs, speedup_from_length

PASSES, MOST_PASSES = 4, 24
SECONDS = 5.0  # of passes in an evaluation, where they are short: single ones differ by a tenth
ROUNDS = 32  # of each number of proposals in a pass, at least: the first ones are slow
TOKENS = 3 * ROUNDS  # of an answer, at most: what many drafters write in so many rounds
SERVER_ROUNDS = 4  # few: they delay the start of a server
SERVER_PROMPT_TOKENS = 8


def calibrate(
    plain: Decoder,
    drafted: Decoder,
    prompts: PromptIds,
    setting: Setting,
    *,
    gammas: Sequence[int] = (),
    guessed: Decoder | None = None,
    guesses: Sequence[int] = (MOST_GAMMA,),
    note: Callable[[str], None] = lambda line: None,
) -> Costs:
    """Costs of `drafted`'s proposer, on `prompts` that must not be the timed ones.

    c and v are measured at `setting.gamma` and at the other `gammas`, which `setting.capacity` must
    hold too; but not at its neighbours: each number is code of its own, which takes long to
    compile, and a line through two numbers side by side says little of others. A tree is proposed
    whole: at its depth alone. guessed: a decoder whose proposals run no model. Its rounds tell v at
    those of `guesses` that are neither measured nor the next one beyond. What a draft's proposals
    cost there stays on their line, as its code for them is not made.
    """
    gamma, others = max(setting.gamma, 1), gammas
    if (tree := drafted.tree(DRAFT_ID)) is not None:
        gamma, others, guessed = tree.depth, (), None
    counts = [0, gamma, *(one for one in others if abs(one - gamma) > 1)]
    decoders = dict.fromkeys(counts, drafted) | {0: plain}
    if guessed is not None:
        known = {*counts, max(counts) + 1}
        decoders |= {one: guessed for one in guesses if one not in known}
    if setting.batch_size == 1:  # rows of a batch end apart, so it shrinks as their answers go on
        setting = replace(setting, max_new_tokens=min(setting.max_new_tokens, TOKENS))

    def measure(gamma: int, number: int) -> RoundSeconds:
        first = number * setting.batch_size
        return round_seconds(
            decoders[gamma], prompts, setting, gamma=gamma, first=first, least=ROUNDS
        )

    clock = synchronised_clock(plain.target.device)
    began = clock()
    for count in decoders:  # makes code and buffers, which would count in a first pass
        note(f"first rounds of {count} proposals")
        measure(count, 0)
    passes = SECONDS / max(clock() - began, SECONDS / MOST_PASSES)
    costs = costs_by(measure, gamma, [*decoders], passes=max(PASSES, round(passes)))
    own = {count: costs.draft_units[count] for count in counts if count > 0}
    return replace(costs, draft_units=own)


def costs_by(
    measure: Callable[[int, int], RoundSeconds],
    gamma: int,
    gammas: Sequence[int],
    *,
    passes: int = PASSES,
) -> Costs:
    """c, v and o of rounds of `gamma` proposals, and c and v of those of all `gammas`.

    Ratios to the plain steps, those without any, of the same pass, as medians over passes. Every
    other pass goes through `gammas` backwards, so that a steady drift cancels. measure: rounds of
    so many proposals in the pass of a number.
    """
    seen = [
        {count: measure(count, number) for count in gammas[:: -1 if number % 2 else 1]}
        for number in range(passes)
    ]

    def ratio(count: int, part: str) -> float:
        return statistics.median(getattr(one[count], part) / sum(one[0]) for one in seen)

    propose, verify = (
        {count: ratio(count, part) for count in gammas} for part in ("propose", "verify")
    )
    return Costs(
        plain_seconds=statistics.median(sum(one[0]) for one in seen),
        cost_ratio=propose[gamma] / gamma,
        verify_ratio=verify[gamma],
        overhead_ratio=ratio(gamma, "rest"),
        verify_ratios=verify,
        draft_units={count: unit for count, unit in propose.items() if count > 0},
    )


def round_seconds(
    decoder: Decoder,
    prompts: PromptIds,
    setting: Setting,
    *,
    gamma: int,
    first: int = 0,
    least: int = 1,
    **options: Any,
) -> RoundSeconds:
    """Means over the rounds in which an idle `decoder` answers `prompts`, from number `first` on.

    Batch after batch, until there are `least` rounds of them. rest: all that is neither proposing
    nor verifying. options: of `timed_batch`.
    """

    def spent() -> tuple[float, list[RoundSeconds]]:
        """Seconds a round, and the parts of each."""
        seconds, parts, row = 0.0, list[RoundSeconds](), first
        while len(parts) < least:
            batch = [prompts[(row + i) % len(prompts)] for i in range(setting.batch_size)]
            chunk, more = timed_batch(decoder, batch, setting, gamma=gamma, first=row, **options)
            seconds, parts, row = seconds + chunk.seconds, parts + more, row + setting.batch_size
        return seconds / len(parts), parts

    late = decoder.late
    decoder.late, decoder.clock = False, synchronised_clock(decoder.target.device)
    try:
        whole, parts = spent()
    finally:
        decoder.late, decoder.clock = late, None
    propose, verify, _ = map(statistics.fmean, zip(*parts, strict=True))
    one_by_one = RoundSeconds(propose, verify, whole - propose - verify)
    if not late:
        return one_by_one
    # Where results come late the host works while the device does: a round is shorter than its
    # parts one by one, and what each adds to it is taken to shrink alike.
    shorter = spent()[0] / whole
    return RoundSeconds(*(shorter * part for part in one_by_one))


def predicted_speedup(timed: Timed, plain: Timed, costs: Costs) -> float:
    """tau / (gamma c + v + o): what the rounds of one way gain over plain ones.

    Of rows that are decoded together, tau is what a round of all of them yields, over what a plain
    one does; and calibration, whose batches shrink as the timed ones do, knows what it costs.
    """
    length = timed.tokens_a_round / plain.tokens_a_round
    return speedup_from_length(length, timed.gamma, **costs.ratios)


def measured_policy(decoder: Decoder, proposer_id: str, gamma: int) -> AdaptiveGamma:
    """A policy up to `gamma` by the measured costs of an idle `decoder` and one of its proposers.

    At few gammas and batch sizes (one row, a quarter of the slots, all), since each may be compiled
    code of its own.
    """
    steps = sorted({0, 1, gamma // 2, gamma})
    sizes = sorted({1, max(1, decoder.free_slots // 4), decoder.free_slots})
    costs = {size: decoder_costs(decoder, proposer_id, size, steps) for size in sizes}
    return AdaptiveGamma(costs, steps=steps)


def decoder_costs(decoder: Decoder, proposer_id: str, size: int, gammas: Sequence[int]) -> Costs:
    """Costs of rounds of `size` rows with each of `gammas`, which hold 0 and a larger one."""
    most = max(gammas)
    tree = decoder.tree(proposer_id)
    scratch = max(most, tree.nodes) if tree else most
    length = min(SERVER_PROMPT_TOKENS, decoder.capacity - 2 * (scratch + 1) - 1)
    prompt = [token % decoder.target.vocab_size for token in range(length)]
    if (start := decoder.target.start_id) is not None:  # of what an encoder reads
        prompt = [*(token for token in prompt[1:] if token != start), start]
    room = decoder.capacity - length - 2 * (scratch + 1)
    setting = Setting(
        max_new_tokens=min(SERVER_ROUNDS * (most + 1), room),  # no row ends before
        gamma=most,
        batch_size=size,
        capacity=decoder.capacity,
    )

    def measure(gamma: int, _: int) -> RoundSeconds:
        return round_seconds(
            decoder, [prompt], setting, gamma=gamma, most=SERVER_ROUNDS, proposer_id=proposer_id
        )

    return costs_by(measure, most, gammas)
