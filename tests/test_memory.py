"""What a stage frees stays with its process: the next large tensor costs no page faults."""

import subprocess
import sys

import pytest
import torch

from draftkit.models.devices import peak_bytes
from tests.launching import ROOT

FAULTS = """
import resource, sys
import torch
from draftkit.models.devices import keep_freed_memory, peak_bytes, reset_peak
cpu = torch.device("cpu")
if sys.argv[1] == "keep":
    keep_freed_memory()
def take():
    held = [b"x" * (16 << 20) for _ in range(4)]  # more than glibc keeps by itself
reset_peak(cpu)
for _ in range(3):
    take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    take()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
peak = peak_bytes(cpu)
reset_peak(cpu)
print(faults, peak - peak_bytes(cpu))
"""


def faults(mode: str) -> tuple[int, int]:
    """Of taking and freeing 64 MiB 20 times; and by how much the peak falls when it is reset."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], cwd=ROOT, capture_output=True, text=True, check=True
    )
    count, fallen = map(int, done.stdout.split())
    return count, fallen


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_used_again_without_page_faults_and_is_not_of_the_next_peak() -> None:
    kept, fallen = faults("keep")
    assert 20 * kept < faults("plain")[0]
    assert fallen > 40 << 20


def test_a_process_that_uses_no_device_has_used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert peak_bytes(torch.device("cpu")) > 1 << 20
