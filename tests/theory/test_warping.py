"""The served distribution equals that of Hugging Face's logits processors, row by row."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftkit.theory import warping
from draftkit.theory.warping import (
    SamplingParams,
    promote,
    seen_along,
    seen_tokens,
    warp,
    warped_logits,
)
from tests.params import params_of

VOCAB_SIZE = 40
SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": penalty}
    for temperature, top_k, top_p, penalty in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 5, 100), (1.0, 0.9, 0.05), (1.0, 1.3, 0.8)
    )
]


def random_batch(rows: int, positions: int, dtype: torch.dtype, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (rows, positions, VOCAB_SIZE)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return (logits.round() if ties else logits).to(dtype)


def hugging_face(
    logits: Tensor,
    history: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
) -> Tensor:
    """Scores [1, V] of one position through transformers' processors, in its order."""
    processors = LogitsProcessorList()
    if repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(history, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
def test_a_batch_of_mixed_settings_equals_hugging_face_row_by_row(
    dtype: torch.dtype, ties: bool
) -> None:
    logits = random_batch(len(SETTINGS), 2, dtype, ties)
    history = torch.randint(
        VOCAB_SIZE, (len(SETTINGS), 6), generator=torch.Generator().manual_seed(1)
    )
    seen = seen_tokens(history, torch.full((len(SETTINGS),), 6), VOCAB_SIZE)
    ours = warped_logits(logits, params_of(SETTINGS), seen[:, None].expand_as(logits))
    for row, settings in enumerate(SETTINGS):
        for position in range(2):
            theirs = hugging_face(
                logits[row : row + 1, position], history[row : row + 1], **settings
            )
            mine, theirs = ours[row, position], theirs[0]
            if ties and settings["top_p"] < 1:
                # Their nucleus keeps some of the tokens that tie for its last place, ours all.
                smallest = theirs[theirs > -torch.inf].min()
                tied = (theirs == -torch.inf) & (mine == smallest)
                theirs = torch.where(tied, smallest, theirs)
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_the_flags_spare_work_but_never_change_a_result() -> None:
    neutral = SamplingParams.uniform(3)
    assert [neutral.uses_top_k, neutral.uses_top_p, neutral.uses_penalty] == [False] * 3
    assert (neutral.uses_greedy, neutral.uses_sampling) == (False, True)
    everything = SamplingParams(
        temperature=neutral.temperature,
        top_k=neutral.top_k,
        top_p=neutral.top_p,
        repetition_penalty=neutral.repetition_penalty,
        uses_top_k=True,
        uses_top_p=True,
        uses_penalty=True,
        uses_greedy=True,
        uses_sampling=True,
    )
    logits = random_batch(3, 2, torch.float32)
    logits[0, 0, 0] = 200.0  # all other probabilities round away, but none may be cut
    seen = torch.ones(logits.shape, dtype=torch.bool)
    assert torch.equal(warped_logits(logits, everything, seen), logits)
    assert torch.equal(warped_logits(logits, neutral), logits)


def test_sorting_only_as_many_logits_as_rows_can_keep_changes_nothing() -> None:
    settings = [one for one in SETTINGS if one["top_k"] in (1, 5)]
    params = params_of(settings)
    assert params.largest_top_k == 5
    logits = random_batch(len(settings), 2, torch.float64, ties=True)
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    assert torch.equal(
        warped_logits(logits, params, seen),
        warped_logits(logits, replace(params, largest_top_k=None), seen),
    )


def by_sorting(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Which logits [V] stay, by the definition: in order, each while top-p is not reached."""
    order = logits.sort(descending=True).values
    if top_k:
        order = order[:top_k]
    smallest = order[-1]
    # The mass of the ids at least as likely as the last that counts.
    probs = torch.where(logits >= smallest, logits, -torch.inf).softmax(-1)
    above = torch.stack([probs[logits > value].sum() for value in order])
    if top_p < 1:
        smallest = order[above < top_p][-1]
    return logits >= smallest


ROWS = {
    "random": lambda v, g: 4 * torch.randn(v, generator=g, dtype=torch.float64),
    "tied": lambda v, g: torch.randn(v, generator=g, dtype=torch.float64).round(),
    "all equal": lambda v, g: torch.full((v,), -3.5, dtype=torch.float64),
    "one for all": lambda v, g: torch.zeros(v, dtype=torch.float64).index_fill_(
        0, torch.randint(v, (1,), generator=g), 900.0
    ),
    "far from 0": lambda v, g: 1e5 + torch.randn(v, generator=g, dtype=torch.float64),
    "about 0": lambda v, g: 1e-30 * torch.randn(v, generator=g, dtype=torch.float64),
    "ids left out": lambda v, g: torch.where(
        torch.arange(v) % 3 == 0, torch.randn(v, generator=g, dtype=torch.float64), -torch.inf
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ROWS)
def test_cuts_without_a_sort_are_those_of_a_sort(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of its own cut, among them cuts between ties, after one id and before the last."""
    monkeypatch.setattr(warping, "LEAST_UNSORTED", 0)
    generator = torch.Generator().manual_seed(7)
    cuts = [
        {"top_k": top_k, "top_p": top_p}
        for top_k, top_p in itertools.product((0, 1, 7, 33, 100), (1.0, 0.9999, 0.77, 0.31, 1e-9))
    ]
    rows = torch.stack([ROWS[kind](33, generator) for _ in cuts]).to(dtype)
    params = params_of(cuts)
    assert params.largest_top_k is None  # as rows with a top-k alone are sorted
    stays = warped_logits(rows[:, None], params)[:, 0] > -torch.inf
    for row, cut, mine in zip(rows, cuts, stays, strict=True):
        assert mine.equal(by_sorting(row.double(), **cut) & (row > -torch.inf)), cut


@pytest.mark.parametrize("name", ["top_k", "top_p", "repetition_penalty", "temperature"])
def test_a_flag_is_set_exactly_when_a_row_needs_it(name: str) -> None:
    active = {"top_k": 3, "top_p": 0.5, "repetition_penalty": 1.2, "temperature": 0.0}
    flag = {
        "top_k": "uses_top_k",
        "top_p": "uses_top_p",
        "repetition_penalty": "uses_penalty",
        "temperature": "uses_greedy",
    }
    one = SamplingParams.uniform(1, **{name: active[name]})
    assert [getattr(one, each) for each in flag.values()] == [each == name for each in flag]
    assert one.uses_sampling == (name != "temperature")


def test_greedy_rows_alone_and_beside_sampled_ones_are_the_same() -> None:
    logits = random_batch(2, 3, torch.float32, ties=True)
    greedy = SamplingParams.uniform(1, temperature=0.0)
    both = params_of([{"temperature": 0.0}, {}])
    for function in (warped_logits, warp):
        assert torch.equal(function(logits[:1], greedy), function(logits, both)[:1])
        assert torch.equal(
            function(logits[1:], SamplingParams.uniform(1)), function(logits, both)[1:]
        )


def test_temperature_zero_is_one_hot_at_the_first_largest_penalised_logit() -> None:
    logits = torch.tensor([[[5.0, 4.9, 4.9, -1.0]], [[1.0, 3.0, 3.0, -torch.inf]]])
    params = SamplingParams.uniform(2, temperature=0.0, top_k=2, top_p=0.5, repetition_penalty=1.1)
    seen = torch.zeros(2, 1, 4, dtype=torch.bool)
    seen[0, 0, 0] = True  # 5 / 1.1 falls below 4.9
    ours = warped_logits(logits, params, seen)
    one_hot = torch.tensor([[[0.0, 1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0]]])
    assert torch.equal(ours, torch.where(one_hot == 1, 0.0, -torch.inf))
    assert torch.equal(warp(logits, params, seen), one_hot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_to_float32_before_any_arithmetic(dtype: torch.dtype) -> None:
    logits = random_batch(2, 2, dtype)
    params = SamplingParams.uniform(2, temperature=0.7, top_k=9, top_p=0.9)
    assert promote(logits).dtype == torch.float32
    assert torch.equal(warp(logits, params), warp(logits.float(), params))


def test_a_whole_round_under_a_penalty_equals_hugging_face_position_by_position() -> None:
    settings = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.4}
    generator = torch.Generator().manual_seed(5)
    prefix = torch.randint(VOCAB_SIZE, (6, 9), generator=generator)
    length = torch.tensor([9, 1, 5, 4, 9, 2])
    block = torch.randint(VOCAB_SIZE, (6, 4), generator=generator)
    logits = random_batch(6, 5, torch.float64)
    along = seen_along(seen_tokens(prefix, length, VOCAB_SIZE), block)
    ours = warp(logits, SamplingParams.uniform(6, **settings), along)
    for row in range(6):
        for position in range(5):
            history = torch.cat([prefix[row, : length[row]], block[row, :position]])[None]
            theirs = hugging_face(logits[row : row + 1, position], history, **settings)
            torch.testing.assert_close(ours[row, position], theirs.softmax(-1)[0])


def test_warping_compiles_without_a_break() -> None:
    logits = random_batch(5, 3, torch.float32)
    params = SamplingParams.uniform(5, temperature=0.7, top_k=9, top_p=0.9, repetition_penalty=1.2)
    tokens = torch.randint(VOCAB_SIZE, (5, 2), generator=torch.Generator().manual_seed(0))

    def served(logits: Tensor, params: SamplingParams, tokens: Tensor, length: Tensor) -> Tensor:
        seen = seen_along(seen_tokens(tokens, length, VOCAB_SIZE), tokens)
        return warp(logits, params, seen)

    length = torch.tensor([2, 1, 0, 2, 1])
    compiled = torch.compile(served, backend="eager", fullgraph=True)
    expected = served(logits, params, tokens, length)
    assert torch.equal(compiled(logits, params, tokens, length), expected)
