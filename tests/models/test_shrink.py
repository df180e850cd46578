"""A drafter cut from its target, against the target with layers skipped; and the ids it keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2MoeConfig,
)

from draftkit.models.adapter import CausalAdapter
from draftkit.models.cache import SlotCache
from draftkit.models.files import KEPT_IDS
from draftkit.models.shapes import layer_stack
from draftkit.models.shrink import (
    chosen_layers,
    frequent_ids,
    read_kept_ids,
    share_of_tokens,
    shrink,
)
from tests import tiny

LAYERS = [0, 2, 3]
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
few = pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
architectures = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


def deep(architecture: str, **options: Any) -> PreTrainedModel:
    """A model of four layers, of two kinds where there are two."""
    changes: dict[str, Any] = {"n_layer" if architecture == "gpt2" else "num_hidden_layers": 4}
    if architecture.startswith("gemma") and architecture != "gemma":
        changes["layer_types"] = MIXED
    return tiny.model(architecture, **changes, **options)


def tokens() -> Tensor:
    return torch.tensor(tiny.prompts([20, 20]))


def skipped(model: Any, layers: list[int]) -> Tensor:
    """The logits of `model` when its other layers hand on what they are given."""

    def hand_on(_: Any, given: tuple[Any, ...], output: Any) -> Any:
        return (given[0], *output[1:]) if isinstance(output, tuple) else given[0]

    base = model.base_model
    stack = base.h if hasattr(base, "h") else base.layers
    others = [layer for number, layer in enumerate(stack) if number not in layers]
    handles = [layer.register_forward_hook(hand_on) for layer in others]
    logits = model(input_ids=tokens(), use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


@architectures
@torch.no_grad()
def test_a_cut_model_is_its_target_without_the_other_layers(architecture: str) -> None:
    target = deep(architecture, dtype=torch.float64)
    expected = skipped(target, LAYERS)
    assert not torch.allclose(expected, target(input_ids=tokens()).logits, atol=1e-3)
    draft = shrink(target, LAYERS)
    assert torch.equal(draft(input_ids=tokens(), use_cache=False).logits, expected)


@few
@torch.no_grad()
def test_layers_of_a_cut_model_find_their_own_slots_and_masks(architecture: str) -> None:
    draft = CausalAdapter(shrink(deep(architecture), LAYERS), vocab_size=tiny.VOCAB_SIZE)
    cache = SlotCache(2, 24)
    positions = torch.arange(20).expand(2, 20)
    draft.prefill(tokens()[:, :15], positions=positions[:, :15], cache=cache)
    found = draft.step(tokens()[:, 15:], positions=positions[:, 15:], cache=cache)
    expected = draft.model(input_ids=tokens(), use_cache=False).logits[:, 15:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@few
@torch.no_grad()
def test_a_cut_model_is_saved_as_any_other(architecture: str, tmp_path: Path) -> None:
    draft = shrink(deep(architecture), [1, 3])
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.num_hidden_layers == 2
    kinds = getattr(loaded.config, "layer_types", None)
    assert kinds is None or len(kinds) == 2
    assert torch.equal(loaded(input_ids=tokens()).logits, draft(input_ids=tokens()).logits)


def test_a_cut_model_shares_nothing_with_its_target() -> None:
    target = deep("llama", tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    draft = shrink(target, [0, 1, 2, 3])
    assert draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(1)
    after = target.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert target.config.num_hidden_layers == 4


def test_what_is_no_list_of_layers_is_left_alone() -> None:
    target: Any = deep("qwen3", dtype=torch.bfloat16)
    target.config.eos_token_id = [1, 2, 3, 4]  # as many as layers
    target.generation_config.eos_token_id = [1, 2, 3, 4]
    draft: Any = shrink(target, [1])
    assert draft.config.eos_token_id == draft.generation_config.eos_token_id == [1, 2, 3, 4]
    assert draft.dtype == torch.bfloat16
    assert not draft.training


def test_cutting_leaves_the_random_state_alone() -> None:
    target = deep("llama")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    shrink(target, [0])
    assert torch.equal(torch.rand(2), expected)


def test_so_many_layers_are_the_first_ones_and_the_last() -> None:
    assert chosen_layers(4, 30) == [0, 1, 28, 29]
    assert chosen_layers(3, 10) == [0, 1, 9]
    assert chosen_layers(1, 10) == [0]
    assert chosen_layers(10, 10) == [*range(10)]
    assert chosen_layers([2, 5], 10) == [2, 5]


@pytest.mark.parametrize("layers", [[], [0, 4], [-1], [2, 1], [1, 1], 5, 0, -1])
def test_other_numbers_than_the_targets_are_refused_in_one_line(layers: int | list[int]) -> None:
    with pytest.raises(ValueError, match=r"^draft\.shrink\.layers: the target has 4 layers") as e:
        shrink(deep("llama"), layers)
    assert "numbered 0 to 3" in str(e.value)
    assert "\n" not in str(e.value)


@torch.no_grad()
def test_the_layers_of_the_text_are_cut_where_pictures_have_as_many() -> None:
    text = tiny.ARCHITECTURES["gemma3"][1] | {"num_hidden_layers": 4, "layer_types": MIXED}
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sight |= {"num_hidden_layers": 4, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    config = Gemma3Config(
        text_config=text | {"vocab_size": 300}, vision_config=sight, mm_tokens_per_image=4
    )
    target = Gemma3ForConditionalGeneration(config).eval()
    draft, held = shrink(target, LAYERS), target.model.language_model.layers
    name, layers = layer_stack(draft)
    assert name == "model.language_model.layers"
    for number, layer in zip(LAYERS, layers, strict=True):
        for key, weight in layer.state_dict().items():
            assert torch.equal(weight, held[number].state_dict()[key])
    assert draft(input_ids=tokens()).logits.isfinite().all()


def test_a_target_that_builds_layers_by_their_number_is_refused() -> None:
    config = Qwen2MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        mlp_only_layers=[0],
    )
    target = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"^draft\.shrink\.layers: qwen2_moe makes layers by") as e:
        shrink(target, [1, 2])
    assert "\n" not in str(e.value)


# Kept ids


def test_the_most_frequent_ids_are_kept_the_smaller_of_equals() -> None:
    texts = [[5, 5, 5, 9], [9, 2, 7, 7], [3]]

    def kept(count: int, always: tuple[int, ...] = ()) -> list[int]:
        return frequent_ids(texts, count=count, always=always, vocab_size=11).tolist()

    assert kept(1) == [5]
    assert kept(2) == [5, 7]  # 7 and 9 occur twice each
    assert kept(4) == [2, 5, 7, 9]  # 2 and 3 once
    assert kept(2, always=(10, 7)) == [5, 7, 10]
    assert kept(7) == [0, 1, 2, 3, 5, 7, 9]  # none less than asked for
    assert kept(11) == list(range(11))
    with pytest.raises(ValueError, match=r"^draft\.shrink\.vocabulary: 12 of 11 ids"):
        kept(12)


def test_kinds_of_text_weigh_the_same_whatever_they_hold() -> None:
    long, short = [[1] * 60 + [2] * 40], [[3, 3, 4]]
    kept = frequent_ids(long, short, count=2, always=(), vocab_size=11)
    assert kept.tolist() == [1, 3]  # 4 has a third of a kind, 2 two fifths
    assert frequent_ids(long, short, count=3, always=(), vocab_size=11).tolist() == [1, 2, 3]


def test_the_share_of_tokens_counts_tokens() -> None:
    assert share_of_tokens([[1, 1, 2], [3]], torch.tensor([1, 3, 8])) == 0.75


DAMAGED = ["[3, 1]", "[1, 1]", "[1, 10]", "[-1, 1]", "[]", "[1.0]", "[false, true]", "[[1]]"]
DAMAGED += ['{"ids": [1]}', "[1", "\x10\x00garbage"]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_kept_ids_are_refused_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / KEPT_IDS).write_text(content)
    line = rf"^draft\.path .*{KEPT_IDS}: it must hold a list of ids below 10, ascending"
    with pytest.raises(ValueError, match=line) as error:
        read_kept_ids(tmp_path / KEPT_IDS, 10)
    assert "\n" not in str(error.value)
