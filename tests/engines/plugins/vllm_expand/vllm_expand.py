"""A plugin of vLLM: its CPU build reads temperature, top_k and top_p of drafted tokens as written.

The rejection sampler of vLLM repeats the values of a request once for each of its drafted tokens.
On a CPU without Triton the kernel of 0.32 fills a copy that is dropped
(vllm/utils/cpu_triton_utils.py, `_expand_kernel_impl`; issue 55005 of vllm-project/vllm), so that
drafted tokens are judged at the temperature that uninitialised memory happens to hold.

vLLM loads every installed plugin where VLLM_PLUGINS is unset: this one acts only where it is named.
"""

import os

import torch


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cumulative: torch.Tensor,
    old: float,
    new: float,
    _max_tokens: int | None = None,
) -> None:
    """Fill `output` [tokens] from `values` [requests], `old` replaced by `new`.

    cumulative: [requests], drafted tokens of the requests up to and including each.
    """
    counts = cumulative.diff(prepend=cumulative.new_zeros(1)).long()
    output.copy_(values.masked_fill(values == old, new).repeat_interleave(counts))


def install() -> None:
    """Put `expand` where the platform, which registers its kernels later, takes it from."""
    if "vllm_expand" in os.environ.get("VLLM_PLUGINS", "").split(","):
        from vllm.utils import cpu_triton_utils

        cpu_triton_utils._expand_kernel_impl = expand
