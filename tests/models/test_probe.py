"""What a loaded model is tried for: good families pass, and each fault is told by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config

from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.probe import check_packing, check_passes
from draftkit.models.seq2seq import Seq2SeqAdapter
from tests import tiny

HALVES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_family_passes_in_both_precisions(dtype: torch.dtype) -> None:
    for name in tiny.ARCHITECTURES:
        adapter = tiny.adapter(name, dtype=dtype)
        check_passes(adapter, name)
        check_packing(adapter, name)
    for name in tiny.SEQ2SEQ:
        model = tiny.seq2seq_model(name, dtype=dtype)
        check_passes(Seq2SeqAdapter(model, vocab_size=tiny.VOCAB_SIZE), name)


def test_ids_that_are_not_kept_need_no_finite_logits() -> None:
    kept = torch.tensor([0, 5, 9])
    check_passes(CausalAdapter(tiny.model(), vocab_size=tiny.VOCAB_SIZE, kept_ids=kept), "draft")


def rope(dtype: torch.dtype, **settings: Any) -> Adapter:
    """A model whose frequencies change within what is given as its context."""
    adapter = tiny.adapter(dtype=dtype, rope_parameters={"rope_theta": 1e4, **settings})
    adapter.max_positions = 4 * tiny.MAX_POSITIONS
    return adapter


def longrope(dtype: torch.dtype) -> Adapter:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * i for i in range(8)]}
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    parameters: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = Phi3Config(**shape, **lengths, rope_parameters=parameters, pad_token_id=None)
    made = tiny.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    adapter = CausalAdapter(made.to(dtype), vocab_size=tiny.VOCAB_SIZE)
    adapter.max_positions = config.max_position_embeddings
    return adapter


def hooked(change: Callable[[Any], None]) -> Callable[[torch.dtype], Adapter]:
    """A model whose code does what no family that is known here does."""

    def make(dtype: torch.dtype) -> Adapter:
        adapter = tiny.adapter(dtype=dtype)
        change(adapter.model)
        return adapter

    return make


def mixing(model: Any) -> None:
    """Every row gets something of all others."""

    def mixed(_: Any, __: Any, embedded: Tensor) -> Tensor:
        return embedded + embedded.mean((0, 1))

    model.get_input_embeddings().register_forward_hook(mixed)


def counting(model: Any) -> None:
    """Positions are counted in the pass, whatever is given."""

    def counted(_: Any, inputs: Any, given: dict[str, Any]) -> Any:
        places = given["position_ids"]
        return inputs, {**given, "position_ids": torch.arange(places.shape[1])[None]}

    model.model.rotary_emb.register_forward_pre_hook(counted, with_kwargs=True)


def raising(model: Any) -> None:
    """No batches."""

    def refused(_: Any, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > 1:
            raise TypeError("one row\nat a time")

    model.get_input_embeddings().register_forward_pre_hook(refused)


def overflowing(model: Any) -> None:
    model.get_output_embeddings().weight.data[7] = torch.inf


FAULTS: dict[str, tuple[Callable[[torch.dtype], Adapter], str]] = {
    "dynamic": (lambda d: rope(d, rope_type="dynamic", factor=4.0), r"rope_type dynamic\) .* at"),
    "longrope": (longrope, r"phi3 \(rope_type longrope\) gives .* beside one at position 127 than"),
    "rows that mix": (hooked(mixing), "llama gives a text other logits beside a longer one than"),
    "no positions": (hooked(counting), "gives a text other logits in pieces over a cache than"),
    "no batches": (hooked(raising), r"cannot compute a short text beside .*\(one row\): give"),
    "infinite": (hooked(overflowing), r"4 of 1,032 logits of a short text are no finite numbers"),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("make", "message"), FAULTS.values(), ids=FAULTS)
def test_what_depends_on_the_rest_of_a_pass_is_refused(
    make: Callable[[torch.dtype], Adapter], message: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        check_passes(make(dtype), "target.path x")
    assert str(refused.value).startswith("target.path x: ")
    assert "\n" not in str(refused.value)
