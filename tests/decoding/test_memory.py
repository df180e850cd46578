"""Decoding needs weights and caches and little else, and keeps nothing.

The peak is measured by what PyTorch's allocator gives out and takes back, code included; growth by
tensors that live and by the resident memory of the process, which Linux counts.
"""

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding import graphs
from draftkit.decoding.decoder import Decoder, packed_copies
from draftkit.decoding.generation import finish
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.models.adapter import CausalAdapter
from draftkit.models.cache import SlotCache
from tests import tiny
from tests.decoding.driving import DRAFT, SMALL, fresh_graphs, request, strict_compiler
from tests.tabular import random_adapter, relative

MIB = 1 << 20
SHARE, REST = 1.15, 64 * MIB  # of weights and caches, and beside them
CAPACITY, PROMPT, VOCAB_SIZE = 512, 300, 4096
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# A pair large enough for its tensors to show


def medium(layers: int, *, seed: int, width: int = 512) -> CausalAdapter:
    model = tiny.model(
        seed=seed,
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CAPACITY,
    )
    return CausalAdapter(model.requires_grad_(False), vocab_size=VOCAB_SIZE)


def play(
    target: Any, draft: Any, *, compiled: bool = False, rows: int = 4, length: int = PROMPT
) -> int:
    """Decode a full batch, every sampling in use; returns the bytes of the caches."""
    decoder = Decoder(target, slots=rows, capacity=CAPACITY, compiled=compiled)
    proposer = DraftModelProposer(draft)
    decoder.attach(DRAFT, proposer)
    sampling = SamplingConfig(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1)
    prompts = tiny.prompts([length - row for row in range(rows)])
    requests = [
        request(prompt, new=8, gamma=4, sampling=sampling, row=row)
        for row, prompt in enumerate(prompts)
    ]
    finish(decoder, requests)
    return bytes_of(decoder.cache) + bytes_of(proposer._cache)


def bytes_of(cache: SlotCache) -> int:
    return sum(buffer.nbytes for buffer in (*cache._keys, *cache._values))


@dataclass(frozen=True)
class Used:
    """Bytes."""

    weights: int
    caches: int
    peak: int

    def check(self) -> None:
        """Within the bound, and no less than what must be there, lest nothing was measured."""
        floor = self.weights + self.caches
        assert floor > 100 * MIB
        assert 0.95 * floor < self.peak <= SHARE * floor + REST, self


# The peak


def resident(field: str) -> int:
    """A line of this process's status, in bytes: VmRSS, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no {field}")


def settle() -> None:
    """Give back what is free, and let the peak begin anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class Allocations:
    """What PyTorch's allocator gave out: the largest sum at a time, and what was kept."""

    peak = 0
    kept = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    found = Allocations()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        yield found
    inner: Any = profiler.profiler
    events = [e for e in inner.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        found.kept += event.nbytes()
        found.peak = max(found.peak, found.kept)


def test_the_peak_does_not_grow_with_the_number_of_prompts_that_wait() -> None:
    target, draft = medium(1, seed=1), medium(1, seed=2)
    with allocations() as found:
        caches = play(target, draft, rows=32)
    weights = target.weight_bytes + draft.weight_bytes
    Used(weights, caches, weights + found.peak).check()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
@pytest.mark.parametrize(
    ("width", "layers", "draft_layers"),
    [(256, 3, 5), (512, 3, 1), (512, 6, 1)],
    ids=["frozen", "open", "large"],
)
def test_the_peak_of_compiled_decoding_is_weights_and_caches_and_little_else(
    width: int, layers: int, draft_layers: int
) -> None:
    with fresh_graphs():
        target, draft = medium(layers, seed=1, width=width), medium(draft_layers, seed=2)
        assert (packed_copies(target) > 0) == (width == 256)
        with allocations() as first:
            play(target, draft, compiled=True)
        gc.collect()
        with allocations() as again:
            caches = play(target, draft, compiled=True)
    weights = target.weight_bytes + draft.weight_bytes
    Used(weights, caches, weights + first.kept + again.peak).check()


# No growth


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    # Not `isinstance`: it asks things that answer with a warning.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def check_flat(generation: Callable[[int], Any], *, count: int, room: int) -> None:
    """After a few generations neither tensors nor resident memory grow.

    But for a tensor or two that the last round of a decoder had in hand. Tensors are told apart,
    since what earlier tests left behind may go meanwhile.
    """
    for n in range(10):
        generation(n)
    old = {id(tensor): weakref.ref(tensor) for tensor in live_tensors()}
    memory = held()

    def made() -> int:
        """Tensors that live now and did not at first: also those that took the place of others."""
        return sum(id(t) not in old or old[id(t)]() is not t for t in live_tensors())

    for n in range(count // 2):
        generation(n)
    halfway = made()
    for n in range(count // 2, count):
        generation(n)
    assert made() - halfway < 5
    assert held() - memory < room


def held() -> int:
    """Resident bytes, but those that earlier tests left free: growth would fill them unseen."""
    settle()
    return resident("VmRSS")


@linux
@pytest.mark.parametrize(
    "keep", [lambda: torch.zeros(1), lambda: b"x" * MIB], ids=["tensor", "bytes"]
)
def test_growth_would_be_seen(keep: Callable[[], Any]) -> None:
    spare = [b"x" * MIB for _ in range(200)]  # what earlier tests leave free
    del spare
    kept: list[Any] = []
    with pytest.raises(AssertionError):
        check_flat(lambda _: kept.append(keep()), count=50, room=8 * MIB)
    check_flat(lambda _: keep(), count=50, room=8 * MIB)


def generation_of(target: Any, draft: Any, **options: Any) -> Callable[[int], None]:
    """Two rows on a decoder of their own, and two on one that all share."""

    def decoder_of() -> Decoder:
        decoder = Decoder(target, slots=2, capacity=32, **options)
        decoder.attach(DRAFT, DraftModelProposer(draft))
        return decoder

    shared = decoder_of()

    def generation(n: int) -> None:
        for decoder in (decoder_of(), shared):
            finish(decoder, [request([1, 2, n % 7], new=5, row=n), request([3], new=3, row=n)])

    return generation


@linux
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_generations_leave_nothing_behind(count: int) -> None:
    target, draft = tiny.pair(**SMALL)
    check_flat(generation_of(target, draft, late=True), count=count, room=8 * MIB)


@linux
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_generations_by_graphs_leave_nothing_behind(count: int) -> None:
    with strict_compiler() as strict, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (2,))
        target = random_adapter(8, 1)
        generation = generation_of(target, relative(target, 2), compiled=True)
        check_flat(generation, count=count, room=8 * MIB)
        assert strict.made == 2


@linux
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
def test_generations_by_machine_code_leave_nothing_behind() -> None:
    with fresh_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (2,))
        target, draft = tiny.pair(**SMALL)
        check_flat(generation_of(target, draft, compiled=True), count=1000, room=8 * MIB)
