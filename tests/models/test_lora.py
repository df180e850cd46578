"""LoRA in a draft: nothing before training, a plain model after it, and only its weights train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftkit.config.text import LoraConfig
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import save_model
from draftkit.models.lora import merged_weights, with_lora
from draftkit.models.shrink import shrink
from tests import tiny

LORA = LoraConfig(rank=4)
architectures = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


def logits(model: Any) -> Tensor:
    return tiny.logits(model, tiny.tokens(2, 12))


def drafted(architecture: str = "llama", lora: LoraConfig = LORA, **options: Any) -> CausalAdapter:
    return with_lora(tiny.adapter(architecture, **options), lora, seed=1)


def disturbed(draft: CausalAdapter) -> PreTrainedModel:
    """The model of `draft` after something was learnt."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return draft.model


def plain(architecture: str, weights: dict[str, Tensor], **options: Any) -> PreTrainedModel:
    model = tiny.model(architecture, seed=9, **options)
    model.load_state_dict(weights)
    return model


@architectures
def test_fresh_lora_changes_no_logit(architecture: str) -> None:
    before = logits(tiny.model(architecture))
    assert torch.equal(logits(drafted(architecture).model), before)


@architectures
def test_only_the_updates_of_linear_layers_but_the_head_are_trained(architecture: str) -> None:
    draft = drafted(architecture)
    opened = {name for name, weight in draft.model.named_parameters() if weight.requires_grad}
    model = tiny.model(architecture)
    head = model.get_output_embeddings()
    modules = [(name, one) for name, one in model.named_modules() if one is not head]
    layers = {name for name, one in modules if isinstance(one, nn.Linear | Conv1D)}
    assert opened == {f"{name}.lora_{part}.default.weight" for name in layers for part in "AB"}
    assert len(layers) >= 2 * 4


@architectures
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_the_merged_model_is_the_trained_one(
    architecture: str, dtype: torch.dtype, atol: float
) -> None:
    model = disturbed(drafted(architecture, dtype=dtype))
    found = logits(plain(architecture, merged_weights(model), dtype=dtype))
    torch.testing.assert_close(found, logits(model), atol=atol, rtol=0)
    assert (found - logits(tiny.model(architecture, dtype=dtype))).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_draft_is_a_plain_folder(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = disturbed(drafted(architecture, tie_word_embeddings=tied))
    save_model(model, tiny.byte_tokenizer(), tmp_path / "draft")
    plain_folder = tmp_path / "plain"
    save_model(
        tiny.model(architecture, tie_word_embeddings=tied), tiny.byte_tokenizer(), plain_folder
    )
    files = {path.name for path in (tmp_path / "draft").iterdir()}
    assert files == {path.name for path in plain_folder.iterdir()}
    config = (tmp_path / "draft" / "config.json").read_text()
    assert config == (plain_folder / "config.json").read_text()
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "draft", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits(loaded.eval()), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"temperature": 0.9, "top_p": 0.6, "top_k": 7, "min_p": 0.1}, {}),
        ({"temperature": 0.9, "do_sample": False}, {"do_sample": False}),
        ({"temperature": 0.9, "do_sample": True}, {"temperature": 0.9, "do_sample": True}),
        ({"length_penalty": 2.0, "early_stopping": True}, {}),
        ({"num_beams": 2, "length_penalty": 2.0}, {"num_beams": 2, "length_penalty": 2.0}),
        ({"pad_token_id": -1, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"output_scores": True, "suppress_tokens": [3]}, {"suppress_tokens": [3]}),
        ({"use_cache": False, "cache_implementation": "static"}, {"use_cache": False}),
    ],
)
def test_what_a_drafter_says_of_generating_contradicts_itself_nowhere(
    tmp_path: Path, given: dict[str, Any], stored: dict[str, Any]
) -> None:
    target = tiny.model(num_hidden_layers=2)
    target.generation_config = GenerationConfig(eos_token_id=256, **given)
    draft = shrink(target, 1)
    save_model(draft, tiny.byte_tokenizer(), tmp_path / "draft")
    saved = GenerationConfig.from_pretrained(tmp_path / "draft")
    saved.validate(strict=True)
    names = {"eos_token_id", *given}
    kept = {name: value for name in names if (value := getattr(saved, name)) is not None}
    assert kept == {"eos_token_id": 256, **stored}
    assert all(getattr(draft.generation_config, name) == value for name, value in given.items())


def test_updates_repeat_for_a_seed_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    first = dict(drafted().named_parameters())
    assert torch.equal(torch.rand(2), expected)
    again = dict(drafted().named_parameters())
    other = dict(with_lora(tiny.adapter(), LORA, seed=2).named_parameters())
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())


def test_rank_0_is_no_lora() -> None:
    draft = tiny.adapter()
    assert with_lora(draft, LoraConfig(), seed=0) is draft
    assert all(weight.requires_grad for weight in draft.parameters())


def test_what_is_merged_is_twice_b_times_a() -> None:
    draft = drafted(lora=LoraConfig(rank=4), dtype=torch.float64)
    weights = disturbed(draft).state_dict()
    layer = "model.layers.1.mlp.down_proj"
    updates = [weights[f"{layer}.lora_{part}.default.weight"] for part in "BA"]
    expected = weights[f"{layer}.base_layer.weight"] + 2 * updates[0] @ updates[1]
    merged = merged_weights(draft.model)[f"{layer}.weight"]
    torch.testing.assert_close(merged, expected, atol=1e-12, rtol=0)


def test_the_model_stays_the_same_object_and_code_is_not_shared_with_plain_ones() -> None:
    draft = tiny.adapter()
    kept = CausalAdapter(draft.model, vocab_size=258, kept_ids=torch.tensor([1, 2]))
    model, signature = draft.model, draft.signature
    found = with_lora(kept, LORA, seed=0)
    assert found.model is model
    assert found.kept_ids is not None
    assert found.kept_ids.tolist() == [1, 2]
    assert found.signature != kept.signature
    assert CausalAdapter(model, vocab_size=258).signature != signature
