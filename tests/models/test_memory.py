"""What models take is counted from shapes, and what is free within limits of control groups."""

from pathlib import Path

import pytest
import torch

from draftkit.models import memory
from draftkit.models.memory import free_bytes, weight_count
from tests import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma2"])
def test_weights_are_counted_as_they_come_to_be(architecture: str) -> None:
    model = tiny.model(architecture, tie_word_embeddings=True)
    count = sum(weight.numel() for weight in model.parameters())
    assert weight_count(model.config) == count


def test_the_tightest_control_group_counts_but_for_pages_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "groups")
    assert free_bytes(CPU) == 8000 << 10
    for group, most in ((inner, "max"), (inner.parent, "3000000")):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("1000000\n")
        stat = "anon 500000\ninactive_file 300000\nactive_file 100000\n"
        (group / "memory.stat").write_text(stat)
    assert free_bytes(CPU) == 3_000_000 - 1_000_000 + 400_000
    (inner.parent / "memory.max").write_text("1000\n")
    assert free_bytes(CPU) == 0
