"""Noise is uniform, independent across every part of its key, and the same on every machine."""

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftkit.theory import noise
from tests.indices import indices_inside_int32
from tests.theory.boxes import LARGEST
from tests.theory.laws import chi_square_p_value

LEVEL = 1e-4  # every p-value below is of fixed numbers: passing once is passing always


def of_keys(*, seed: Tensor, row: Tensor, length: Tensor, offset: int, purpose: int) -> Tensor:
    """One number a key: [N]."""
    keys = {"seed": seed, "row": row, "length": length}
    return noise.uniform(**keys, count=1, purpose=purpose, first=offset)[:, 0]


def grid(seed: int = 7, size: int = 64) -> dict[str, Tensor]:
    """All pairs of `size` rows and `size` lengths under one seed."""
    row = torch.arange(size).repeat_interleave(size)
    length = torch.arange(size).repeat(size)
    return {"seed": torch.full_like(row, seed), "row": row, "length": length}


def python_integers(
    *, seed: int, row: int, length: int, offset: int, purpose: int
) -> tuple[float, int]:
    """The hash in unbounded integers, straight from the description; and its largest product."""
    mask, largest = 2**32 - 1, 0

    def mix(word: int) -> int:
        nonlocal largest
        for shift, multiplier in ((16, 0x7FEB352D), (15, 0x31848BAB)):
            product = (word ^ (word >> shift)) * multiplier
            largest = max(largest, product)
            word = product & mask
        return word ^ (word >> 16)

    words = [seed, seed >> 32, row, length]
    state = []
    for half in range(2):
        total = 0
        for place, word in enumerate(words):
            salt = (4 * half + place + 8 * purpose) * 0x9E3779B9
            total += mix((word ^ salt) & mask)
        state.append(total & mask)
    low = mix(state[0] ^ offset)
    high = mix((state[1] + low) & mask)
    return ((high >> 6) * 2**26 + (low >> 6)) / 2**52, largest


def test_every_value_equals_a_reference_in_unbounded_integers_that_stays_below_2_to_63() -> None:
    seeds = (0, 1, 2**31, 2**32 - 1, 2**40 + 17, 2**63 - 1)
    rows, lengths, purposes = (0, 1, 2**32 - 1), (0, 1, 4096), (noise.DRAFT, noise.DROPOUT)
    for seed, row, length, purpose in itertools.product(seeds, rows, lengths, purposes):
        made = noise.uniform(
            seed=torch.tensor([seed]),
            row=torch.tensor([row]),
            length=torch.tensor([length]),
            count=3,
            purpose=purpose,
        )
        for offset in range(3):
            value, largest = python_integers(
                seed=seed, row=row, length=length, offset=offset, purpose=purpose
            )
            assert made[0, offset].item() == value
            assert largest < 2**63


def test_values_are_float64_in_the_half_open_unit_interval() -> None:
    values = noise.uniform(**grid(), count=64, purpose=noise.ACCEPT)
    assert values.dtype == torch.float64
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    largest = ((torch.tensor([2**26 - 1]) << 26) | (2**26 - 1)).double() * 2.0**-52
    assert largest.item() == LARGEST < 1


@pytest.mark.parametrize("bins", [2, 10, 256])
def test_values_are_uniform(bins: int) -> None:
    values = noise.uniform(**grid(), count=64, purpose=noise.DRAFT).flatten()
    counts = torch.bincount((values * bins).long(), minlength=bins)
    assert chi_square_p_value(counts, torch.full((bins,), 1 / bins)) > LEVEL


def test_every_one_of_the_52_bits_is_a_fair_coin() -> None:
    values = noise.uniform(**grid(), count=16, purpose=noise.NEXT).flatten()
    integers = (values * 2.0**52).long()
    ones = ((integers[:, None] >> torch.arange(52)) & 1).sum(0).double()
    deviation = (ones - len(values) / 2) / (len(values) / 4) ** 0.5
    assert 2 * stats.norm.sf(deviation.abs().max().item()) > LEVEL / 52


SHIFTS = {
    "length": {"length": 1},
    "several lengths": {"length": 5},
    "row": {"row": 1},
    "seed": {"seed": 1},
    "upper half of the seed": {"seed": 2**32},
    "offset": {"offset": 1},
    "length against offset": {"length": 1, "offset": -1},
    "row against length": {"row": 1, "length": -1},
    "seed against row": {"seed": 1, "row": -1},
    "purpose": {"purpose": 1},
    "purpose and offset": {"purpose": 1, "offset": 1},
}


@pytest.mark.parametrize("name", SHIFTS)
def test_neighbouring_keys_give_independent_values(name: str) -> None:
    shift = SHIFTS[name]
    keys = {key: value + 1 for key, value in grid(size=256).items()}
    moved = {key: value + shift.get(key, 0) for key, value in keys.items()}
    first = of_keys(**keys, offset=1, purpose=1)
    second = of_keys(
        **moved, offset=1 + shift.get("offset", 0), purpose=1 + shift.get("purpose", 0)
    )
    pairs = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(pairs, minlength=256)
    assert chi_square_p_value(counts, torch.full((256,), 1 / 256)) > LEVEL
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert 2 * stats.norm.sf(abs(correlation) * len(first) ** 0.5) > LEVEL


def test_a_key_gives_the_same_value_alone_and_in_any_batch() -> None:
    keys = grid(size=8)
    together = noise.uniform(**keys, count=5, purpose=noise.ACCEPT)
    for i in (0, 17, 63):
        alone = {key: value[i : i + 1] for key, value in keys.items()}
        assert torch.equal(noise.uniform(**alone, count=5, purpose=noise.ACCEPT)[0], together[i])
    tail = noise.uniform(**keys, count=2, purpose=noise.ACCEPT, first=3)
    assert torch.equal(tail, together[:, 3:])


def test_sample_draws_token_i_exactly_between_its_cumulative_bounds() -> None:
    probs = torch.tensor([[0.125, 0.0, 0.25, 0.5, 0.125]], dtype=torch.float64)
    bounds = [(0.0, 0.125, 0), (0.125, 0.375, 2), (0.375, 0.875, 3), (0.875, 1.0, 4)]
    for low, high, token in bounds:
        last = torch.nextafter(
            torch.tensor([high], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        )
        for value in (torch.tensor([low], dtype=torch.float64), last):
            assert noise.sample(probs=probs, uniform=value).tolist() == [token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sample_never_returns_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(500, 300, generator=generator, dtype=dtype)
    probs = torch.where(torch.rand(probs.shape, generator=generator) < 0.9, 0, probs)
    probs[:, 7] += 1e-3
    probs[0] = 0
    probs[0, 299] = 1e-30  # any positive sum will do
    for value in (0.0, 0.5, LARGEST):
        uniform = torch.full((500,), value, dtype=torch.float64)
        tokens = noise.sample(probs=probs / probs.sum(-1, keepdim=True), uniform=uniform)
        assert (probs.gather(1, tokens[:, None]) > 0).all()
        # Weights need not be normalised.
        tokens = noise.sample(probs=probs, uniform=uniform)
        assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_sample_skips_tokens_of_probability_zero_where_the_running_sum_wobbles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Parallel cumulative sums round differently at each place: on a GPU they need not be monotone.
    wobbling = torch.tensor([[0.5, 0.5 + 1e-9, 1.0, 1.0 + 1e-9]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda values, dim: wobbling)
    probs = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    for value, token in ((0.5, 2), (0.5 + 5e-10, 2), (LARGEST, 2), (0.1, 0)):
        uniform = torch.tensor([value], dtype=torch.float64)
        assert noise.sample(probs=probs, uniform=uniform).tolist() == [token]


def test_sample_keeps_the_boundaries_of_unlikely_tokens_in_float64() -> None:
    # In float32 a cumulative sum at 1 would not see them.
    probs = torch.tensor([[1.0, 1e-9, 1e-9]])
    total = probs.double().sum()
    for token in (1, 2):
        uniform = (1 + (token - 0.5) * 1e-9) / total
        assert noise.sample(probs=probs, uniform=uniform[None]).tolist() == [token]


def test_noise_compiles_without_a_break() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def draw(seed: Tensor, row: Tensor, length: Tensor, probs: Tensor) -> Tensor:
        uniform = noise.uniform(seed=seed, row=row, length=length, count=2, purpose=noise.NEXT)
        return noise.sample(probs=probs, uniform=uniform[:, 1])

    keys = grid(size=4)
    probs = torch.rand(16, 9, generator=torch.Generator().manual_seed(0))
    uniform = noise.uniform(**keys, count=2, purpose=noise.NEXT)[:, 1]
    assert draw(**keys, probs=probs).equal(noise.sample(probs=probs, uniform=uniform))


@pytest.mark.parametrize("purpose", [noise.DRAFT, noise.ACCEPT, noise.NEXT, noise.DROPOUT])
def test_nothing_made_of_indices_leaves_int32(purpose: int) -> None:
    """Compilers compute it in 32 bits on CUDA: noise would not compile there, or be other bits."""
    keys = grid(size=2)
    with indices_inside_int32():
        noise.uniform(**keys, count=5, purpose=purpose, first=3)
