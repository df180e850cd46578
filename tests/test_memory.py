"""What a stage frees stays with its process: the next large tensor costs no page faults."""

import subprocess
import sys

import pytest
import torch

from draftkit.models import memory
from draftkit.models.memory import peak_bytes
from tests.launching import ROOT

FAULTS = """
import resource, sys
from draftkit.models.memory import give_back_freed_memory, keep_freed_memory
import torch
from draftkit.models.memory import peak_bytes
if sys.argv[1] == "keep":
    keep_freed_memory()
def take():
    held = [b"x" * (16 << 20) for _ in range(4)]  # more than glibc keeps by itself
for _ in range(3):
    take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    take()
assert peak_bytes(torch.device('cpu')) > 64 << 20
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
held = int(open("/proc/self/statm").read().split()[1])
give_back_freed_memory()
if sys.argv[1] == "keep":
    assert held - int(open("/proc/self/statm").read().split()[1]) > 10_000
print(faults)
"""


def faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert 20 * faults("keep") < faults("plain")


def test_a_process_that_uses_no_device_has_used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert peak_bytes(torch.device("cpu")) > 1 << 20


def test_freed_memory_goes_back_once_a_quarter_of_what_was_held_has_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[int] = []
    sizes = (4000, 4900, 5100, 2000, 2400, 2600, 900, 1100, 1200)  # MiB after each step
    now = iter(enumerate(sizes))
    step = 0

    def status(path: object) -> dict[str, int]:
        nonlocal step
        step, size = next(now)
        return {"RssAnon": size << 20}

    monkeypatch.setattr(memory, "_sizes", status)
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: given_back.append(sizes[step]))
    freed = memory.FreedMemory()
    for _ in sizes:
        freed.check()
    # Above 4000 by a quarter; above 2000 by a quarter, which is more than 256; above 900 by 256.
    assert given_back == [5100, 2600, 1200]
