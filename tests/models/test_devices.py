"""Device, precision and free memory: as configured, and by the hardware where it is left open."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftkit.config import HardwareConfig, TargetConfig
from draftkit.models import devices
from draftkit.models.devices import free_bytes, resolve_device, resolve_dtype
from draftkit.models.loading import load_model, save_model, weight_count
from tests import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CPU32 = HardwareConfig(device="cpu", dtype="float32")


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that says it has a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def test_precision_is_as_asked_and_automatic_where_the_hardware_has_it() -> None:
    assert resolve_dtype(CPU32, CPU) == torch.float32
    native = torch.cpu.get_capabilities()
    has_bfloat16 = bool(native.get("avx512_bf16") or native.get("amx_bf16"))
    expected = torch.bfloat16 if has_bfloat16 else torch.float32
    assert resolve_dtype(HardwareConfig(device="cpu"), CPU) == expected


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((9, 0), "bfloat16")])
def test_cards_that_only_emulate_bfloat16_compute_in_float32(
    with_cuda: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    def is_supported(including_emulation: bool = True) -> bool:
        return capability >= (8, 0) or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert resolve_dtype(HardwareConfig(device="cuda"), CUDA) == getattr(torch, dtype)


def test_absent_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"hardware\.device=cuda: no CUDA device"):
        resolve_device(HardwareConfig(device="cuda"))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_on_cuda_nothing_attends_by_cudnn(with_cuda: None, device: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert resolve_device(HardwareConfig(device=device)) == CUDA
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_run_on_the_cpu_changes_nothing_of_cuda(with_cuda: None) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert resolve_device(HardwareConfig(device="cpu")) == CPU
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("device", "mapped"), [(CUDA, CUDA), (CPU, None)])
def test_weights_are_read_to_the_device_where_it_is_cuda(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device, mapped: Any
) -> None:
    save_model(tiny.model(), tiny.byte_tokenizer(), tmp_path / "model")
    seen: list[Any] = []

    def from_pretrained(*_: Any, **options: Any) -> Any:
        seen.append(options.get("device_map"))
        raise OSError("enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    model = TargetConfig(path=str(tmp_path / "model"))
    with pytest.raises(ValueError, match="enough"):
        load_model(model, dtype=torch.float32, device=device)
    assert seen == [mapped]


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
    monkeypatch.setattr(devices, "PROC", tmp_path / "proc")
    monkeypatch.setattr(devices, "CGROUP", tmp_path / "groups")
    assert free_bytes(CPU) == 8000 << 10
    for group, most in ((inner, "max"), (inner.parent, "3000000")):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("1000000\n")
        stat = "anon 500000\ninactive_file 300000\nactive_file 100000\n"
        (group / "memory.stat").write_text(stat)
    assert free_bytes(CPU) == 3_000_000 - 1_000_000 + 400_000
    (inner.parent / "memory.max").write_text("1000\n")
    assert free_bytes(CPU) == 0
