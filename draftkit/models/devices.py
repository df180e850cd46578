"""Where models run and in which precision: what a configuration leaves to the hardware.

Knows no models.
"""

import torch

from draftkit.config import HardwareConfig


def resolve_device(hardware: HardwareConfig) -> torch.device:
    """Return the device; `auto` is CUDA where there is one. Raises ValueError for absent CUDA.

    On CUDA attention by cuDNN is switched off for the process: it makes a plan for every new
    shape, on the host, and texts come in every length; and with masks some of its versions err.
    """
    available = torch.cuda.is_available()
    if hardware.device == "cuda" and not available:
        raise ValueError("hardware.device=cuda: no CUDA device is visible; use hardware=cpu")
    if hardware.device == "cpu" or not available:
        return torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")


def resolve_dtype(hardware: HardwareConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of inference; `auto` is bfloat16 only where the hardware computes in it."""
    if hardware.dtype != "auto":
        return getattr(torch, hardware.dtype)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    features = torch.cpu.get_capabilities()
    native = features.get("avx512_bf16") or features.get("amx_bf16")
    return torch.bfloat16 if native else torch.float32
