"""Decoding needs weights and caches and little else, and keeps nothing.

The peak is measured by what PyTorch's allocator gives out and takes back, code included; growth by
tensors that live and by the resident memory of the process, which Linux counts.
"""

import ctypes
import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding import decoder as decoder_module
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
ROOM = 8 * MIB  # in which resident memory may vary
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


# The peak


def check_peak(weights: int, caches: int, peak: int) -> None:
    """In bytes, within the bound, and no less than what must be there, lest none was seen."""
    floor = weights + caches
    assert floor > 100 * MIB
    assert 0.95 * floor < peak <= SHARE * floor + REST


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
    check_peak(weights, caches, weights + found.peak)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
@pytest.mark.parametrize(
    ("width", "layers", "draft_layers"),
    [(256, 3, 5), (512, 3, 1), (512, 6, 1)],
    ids=["frozen", "open", "large"],
)
def test_the_peak_of_compiled_decoding_is_weights_and_caches_and_little_else(
    width: int, layers: int, draft_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if width == 512:  # as targets that are larger than what is packed
        monkeypatch.setattr(decoder_module, "FREEZE_BYTES", 0)
    with fresh_graphs():
        target, draft = medium(layers, seed=1, width=width), medium(draft_layers, seed=2)
        assert (packed_copies(target) > 0) == (width == 256)
        with allocations() as first:
            play(target, draft, compiled=True)
        gc.collect()
        with allocations() as again:
            caches = play(target, draft, compiled=True)
    weights = target.weight_bytes + draft.weight_bytes
    check_peak(weights, caches, weights + first.kept + again.peak)


# No growth


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    # Not `isinstance`: it asks things that answer with a warning.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def check_flat(generation: Callable[[int], Any], *, count: int) -> None:
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
    assert held() - memory < ROOM


def held() -> int:
    """Resident bytes, but those that earlier tests left free: growth would fill them unseen."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
    check_flat(generation_of(target, draft, late=True), count=count)


@linux
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_generations_by_graphs_leave_nothing_behind(count: int) -> None:
    with strict_compiler() as strict, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (2,))
        target = random_adapter(8, 1)
        generation = generation_of(target, relative(target, 2), compiled=True)
        check_flat(generation, count=count)
        assert strict.made == 2


@linux
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
def test_generations_by_machine_code_leave_nothing_behind() -> None:
    with fresh_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (2,))
        target, draft = tiny.pair(**SMALL)
        check_flat(generation_of(target, draft, compiled=True), count=1000)
