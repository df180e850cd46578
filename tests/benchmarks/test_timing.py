"""A copy's rate counts what was done and divides it by the time that it took."""

import itertools

import pytest
import torch

from pipelines.benchmarks import timing
from pipelines.benchmarks.timing import copy_bandwidth

CPU = torch.device("cpu")
TICK = 0.25  # seconds between two looks at the clock


def test_a_copy_reads_and_writes_every_byte(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setitem(timing.COPIED_BYTES, "cpu", 1000)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: TICK * next(ticks))
    assert copy_bandwidth(CPU) == pytest.approx(2 * 1000 * timing.COPIES / TICK)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_at_more_than_a_hundred_gigabytes_a_second():
    assert copy_bandwidth(torch.device("cuda")) > 1e11
