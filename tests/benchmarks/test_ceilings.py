"""The yardsticks count what was done and divide it by the time that it took."""

import itertools

import pytest
import torch

from pipelines.benchmarks import ceilings
from pipelines.benchmarks.ceilings import (
    copy_bandwidth,
    kernel_seconds,
    launch_seconds,
    matmul_rate,
    wait_seconds,
)

CPU = torch.device("cpu")
TICK = 0.25  # seconds between two looks at the clock


@pytest.fixture
def clock():
    ticks = itertools.count()
    return lambda: TICK * next(ticks)


def test_a_copy_reads_and_writes_every_byte(monkeypatch, clock):
    monkeypatch.setitem(ceilings.COPIED_BYTES, "cpu", 1000)
    monkeypatch.setitem(ceilings.COPIES, "cpu", 4)
    assert copy_bandwidth(CPU, clock) == pytest.approx(2 * 1000 * 4 / TICK)


def test_a_product_has_two_operations_for_each_of_its_terms(clock):
    assert matmul_rate(CPU, 8, clock=clock) == pytest.approx(2 * 8**3 * ceilings.REPEATS / TICK)


def test_launches_share_the_time_of_all_and_waits_are_timed_one_by_one(clock):
    assert launch_seconds(CPU, clock) == pytest.approx(TICK / ceilings.LAUNCHES)
    assert wait_seconds(CPU, clock) == TICK


def test_a_cpu_has_no_graphs():
    assert kernel_seconds(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_at_more_than_a_hundred_gigabytes_a_second():
    assert copy_bandwidth(torch.device("cuda")) > 1e11
