"""Part a: what the machine is, and what it can do at most."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from draftkit.models.devices import resolve_device
from pipelines.benchmarks.ceilings import (
    copy_bandwidth,
    kernel_seconds,
    launch_seconds,
    matmul_rate,
    wait_seconds,
)
from pipelines.benchmarks.gpu.part import Part

MATRIX, REHEARSED_MATRIX = 8192, 64
PACKAGES = ("torch", "triton", "transformers", "accelerate", "numpy", "hydra-core", "pytest")


def machine(device: torch.device) -> dict[str, Any]:
    """Versions, and the device as PyTorch sees it."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    found: dict[str, Any] = {"versions": versions}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "capability_of_wheels": torch.cuda.get_arch_list(),
        }
    return found


def run(part: Part) -> None:
    device = resolve_device(part.config.hardware)
    size = REHEARSED_MATRIX if part.rehearses else MATRIX
    part.step("machine", lambda: machine(device))
    part.step("copy, bytes a second", lambda: copy_bandwidth(device))
    part.step("product in bfloat16, operations a second", lambda: matmul_rate(device, size))
    part.step("launch, seconds of the host", lambda: launch_seconds(device))
    part.step("launch and read, seconds", lambda: wait_seconds(device))
    part.step("kernel in a graph, seconds", lambda: kernel_seconds(device))
