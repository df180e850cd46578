"""In which rows a group runs, what is copied for it, and what is sorted: never another answer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import decoder as decoder_module
from draftkit.decoding import state
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.graphs import COMPILED_BUCKET, Units
from draftkit.decoding.state import DecodeState, group_shape, make_group, to_device
from draftkit.models.cache import BUCKET, SlotCache, rounded_capacity, visible_slots
from tests.decoding.driving import DRAFT, SAMPLINGS, Answer, assert_same, decoder_of, drive, request
from tests.tabular import random_adapter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# The first slots


def units(device: torch.device, *, fixed: bool = False) -> Units:
    made = Units(compiled=False, device=CPU)
    made.device, made._captures = device, fixed
    return made


@pytest.mark.parametrize(
    ("slots", "fixed", "shape"),
    [
        ([0, 1, 2], False, (3, True)),
        ([1, 3], False, (4, True)),  # four rows where they lie, no copy of two
        ([1, 7], False, (2, False)),
        ([*range(16)], False, (16, True)),
        ([0, 2, 3], True, (4, True)),
        ([0, 15], True, (4, False)),
        ([9, 12], True, (4, False)),
        ([*range(5, 12)], True, (16, True)),
    ],
)
def test_on_cuda_a_group_is_the_first_slots_unless_they_are_many_more(
    slots: list[int], fixed: bool, shape: tuple[int, bool]
) -> None:
    assert group_shape(slots, 64, units(CUDA, fixed=fixed)) == shape
    size, is_first = group_shape(slots, 64, units(CPU, fixed=fixed))
    assert (size, is_first) == (shape[0] if fixed else len(slots), False)


def test_the_first_rows_of_a_cache_are_read_where_they_lie() -> None:
    cache = SlotCache(5, 8)
    positions = torch.tensor([[2], [0], [7]])
    states = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 1, 4) + 1
    for rows in (3, torch.arange(3)):
        keys, _ = cache.select(rows, visible=8).at(positions).update(states, states, 0)
        assert keys.shape == (3, 2, 8, 4)
        for row, (place,) in enumerate(positions.tolist()):
            assert (keys[row, :, place] == row + 1).all()
        shares = keys.untyped_storage().data_ptr() == cache._keys[0].untyped_storage().data_ptr()
        assert shares == isinstance(rows, int)
    cache.write_encoder([], torch.tensor([4, 5, 6]))
    assert cache.select(2, visible=8).encoder_lengths.tolist() == [4, 5]


def answers(*, prefix: bool, slots: int = 6, **options: Any) -> list[Answer]:
    """Rows that come and go, of two gammas: each group has the other's rows among its own."""
    decoder = decoder_of(slots=slots, capacity=64, eos_token_ids=[7], **options)
    if prefix:
        decoder._units.device = CUDA  # runs eagerly, in the shapes of that device
    return drive(
        decoder,
        [
            request(
                [1, 2, row % 3],
                gamma=(2, 3, 0)[row % 3],
                new=4 + 5 * row % 11,
                row=row,
                sampling=SAMPLINGS[row % 4],
            )
            for row in range(14)
        ],
    )


@pytest.fixture
def prefixes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    made: list[bool] = []
    real = state.group_shape

    def noted(*arguments: Any) -> tuple[int, bool]:
        size, is_first = real(*arguments)
        made.append(is_first)
        return size, is_first

    monkeypatch.setattr("draftkit.decoding.decoder.group_shape", noted)
    return made


def test_rows_among_the_first_slots_give_what_rows_by_themselves_give(
    prefixes: list[bool],
) -> None:
    assert_same(answers(prefix=True), answers(prefix=False), atol=1e-12)
    assert {True, False} == set(prefixes)


# One copy


def test_a_group_is_made_of_one_tensor_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(*arguments: Any) -> Tensor:
        made.append(arguments)
        return to_device(*arguments)

    held = DecodeState.empty(9, 16, CPU)
    exact = SamplingConfig(temperature=0.1, top_k=7, top_p=0.3, repetition_penalty=1.1)
    for slot in (1, 4, 5):
        held.admit(slot, request([1], sampling=exact))
    monkeypatch.setattr(state, "to_device", counted)
    group = make_group(held, [1, 4, 5], 2, DRAFT, size=4)
    assert len(made) == 1
    assert group.index.tolist() == [0, 1, 4, 5]
    assert group.active.tolist() == [False, True, True, True]
    params = group.params
    assert params.temperature.tolist() == [0.1] * 4  # in double precision, as configured
    assert (params.top_k.tolist(), params.top_k.dtype) == ([7] * 4, torch.int64)
    assert (params.top_p.tolist(), params.repetition_penalty.tolist()) == ([0.3] * 4, [1.1] * 4)


# Sorting


GREEDY = -1


@pytest.mark.parametrize(
    ("top_ks", "largest"),
    [
        ([20, 50, 3], 64),
        ([64, 64], 64),
        ([20, 65, GREEDY], 128),
        ([20, 0], None),
        ([GREEDY], None),
    ],
)
def test_where_every_sampled_row_has_a_top_k_few_logits_are_sorted(
    top_ks: list[int], largest: int | None
) -> None:
    held = DecodeState.empty(len(top_ks), 16, CPU)
    for slot, k in enumerate(top_ks):
        sampling = {"temperature": 0.0} if k == GREEDY else {"top_k": k}
        held.admit(slot, request([1], sampling=SamplingConfig(**sampling)))
    group = make_group(held, [*range(len(top_ks))], 2, DRAFT)
    assert group.params.largest_top_k == largest


# Few shapes


def test_prompts_that_are_fed_in_few_widths_are_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = answers(prefix=False)
    monkeypatch.setitem(decoder_module.WIDTH_STEPS, "cpu", 4)
    target = random_adapter(8, 1)
    widths = set()
    real = type(target).prefill

    def noted(self: Any, tokens: Tensor, **others: Any) -> None:
        widths.add(tokens.shape[1])
        real(self, tokens, **others)

    monkeypatch.setattr(type(target), "prefill", noted)
    assert_same(answers(prefix=False), whole, atol=0)
    assert {width % 4 for width in widths} == {0}


def test_on_cuda_rows_have_a_multiple_of_64_slots() -> None:
    slots = (1, 64, 178, 306, 310, 1034)
    assert [rounded_capacity(n, CUDA) for n in slots] == [64, 64, 192, 320, 320, 1088]
    assert [rounded_capacity(n, CPU) for n in slots] == [*slots]


def test_compiled_the_last_bucket_is_joined_by_all_that_is_more_than_half_of_it() -> None:
    """Attending to a few slots more costs less than code, or a capture, of its own."""
    for capacity, shapes in ((178, {178}), (306, {306}), (512, {256, 512}), (600, {256, 600})):
        every = range(1, capacity + 1)
        made = {visible_slots(n, capacity, COMPILED_BUCKET, joins_last=True) for n in every}
        assert made == shapes
    assert {visible_slots(n, 306, BUCKET) for n in range(1, 307)} == {64, 128, 256, 306}
    few = [visible_slots(n, 150, BUCKET) for n in (1, BUCKET, BUCKET + 1, 150)]
    assert few == [BUCKET, BUCKET, 2 * BUCKET, 150]


@pytest.mark.parametrize(("compiled", "expected"), [(False, 64), (True, 306)])
def test_a_short_row_of_a_compiled_decoder_shares_the_code_of_a_long_one(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, expected: int
) -> None:
    seen = set()

    def run(self: Units, unit: Any, resident: Any, inputs: Any, **_: Any) -> Any:
        seen.add(inputs.visible)
        return unit(resident, inputs)

    monkeypatch.setattr(Units, "run", run)
    decoder = Decoder(random_adapter(8, 1), slots=1, capacity=306, compiled=compiled)
    drive(decoder, [request([1], gamma=0)])
    assert seen == {expected}
