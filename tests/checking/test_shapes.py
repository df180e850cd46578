"""Bounds from shapes: the weights of released models, and what each setting does to a step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from draftkit.checking.shapes import (
    ANY_LENGTH,
    DEMANDS,
    FLOAT32,
    TRAINED,
    Case,
    Shape,
    TextLengths,
    Work,
    activations,
    pair_shapes,
    shape_of,
)
from draftkit.config import DeviceConfig
from draftkit.models.loading import load_model
from pipelines.configuration import compose_config
from tests import tiny
from tests.pairs import paths, save_pairs

LENGTHS = TextLengths(prompt=100, answer=60, mean_prompt=50, mean_answer=30, rows=10)
DEVICE = DeviceConfig(memory=80, bandwidth=1000, flops=100)


def qwen3(layers: int, hidden: int, inner: int, heads: int) -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151_936,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
)


@pytest.mark.parametrize(
    ("config", "weights", "body"),
    [
        (qwen3(28, 1024, 3072, 16), 596_049_920, 440_467_456),  # 0.6B
        (qwen3(36, 2560, 9728, 32), 4_022_468_096, 3_633_511_936),  # 4B
        (LLAMA_8B, 8_030_261_248, 6_979_588_096),
    ],
)
def test_the_weights_of_released_models(config: PreTrainedConfig, weights: int, body: int) -> None:
    shape = shape_of(config)
    assert (shape.weights, shape.body) == (weights, body)
    assert shape.operations(10, 3) == 2 * (10 * body + 3 * shape.vocab_size * shape.hidden)
    assert shape.read == body + shape.vocab_size * shape.hidden


def case(*overrides: str) -> Case:
    config = compose_config(["+experiment=quickstart", *overrides])
    target, draft = shape_of(qwen3(36, 2560, 9728, 32)), shape_of(qwen3(28, 1024, 3072, 16))
    return Case(config, target, draft, LENGTHS, torch.bfloat16)


def test_every_step_with_a_model_has_a_bound_and_a_probe() -> None:
    from draftkit.checking.probes import PROBES
    from pipelines.check import goal_of
    from pipelines.plan import ordered

    made = compose_config(["+experiment=smoke", "source=target", "generate.top_k=4"])
    steps = {step.name for step in ordered([goal_of(made)])}
    assert steps - {"texts", "distill"} == DEMANDS.keys() == PROBES.keys()


def test_training_holds_the_target_and_all_that_learns() -> None:
    whole = DEMANDS["train"](case())
    assert whole.memory["target"] == 2 * case().target.weights
    assert whole.memory["drafter, gradients and moments"] == TRAINED * case().draft.weights
    light = DEMANDS["train"](
        case("draft.lora.rank=8", "draft.shrink.layers=[]", "draft.shrink.steps=0")
    )
    assert light.memory["drafter, gradients and moments"] == FLOAT32 * case().draft.weights
    scored = DEMANDS["train"](case("generate.top_k=64"))
    assert scored.memory["target"] == 0
    assert scored.seconds(DEVICE) < whole.seconds(DEVICE)
    again = DEMANDS["train"](case("optim.activation_checkpointing=true"))
    assert again.memory["activations"] < whole.memory["activations"] / 2


def test_activations_grow_with_rows_and_layers() -> None:
    shape = case().draft
    assert activations(shape, 200, kept=True) == 2 * activations(shape, 100, kept=True)
    a_layer = 6 * shape.hidden + 3 * shape.inner
    assert activations(shape, 1, kept=True) == 2 * 28 * a_layer
    assert activations(shape, 1, kept=False) == 2 * (a_layer + 28 * shape.hidden)


@pytest.mark.parametrize("name", sorted(DEMANDS))
def test_longer_texts_never_take_less(name: str) -> None:
    """So the bound of unknown texts is below that of any."""
    longer = replace(LENGTHS, prompt=200, answer=90, mean_prompt=80, mean_answer=60, rows=30)
    demands = [DEMANDS[name](replace(case(), texts=one)) for one in (ANY_LENGTH, LENGTHS, longer)]
    memory = [one.bytes for one in demands]
    assert memory == sorted(memory)
    seconds = [one.seconds(DEVICE) for one in demands]
    assert seconds == sorted(seconds)


def test_a_device_takes_the_longer_of_computing_and_reading() -> None:
    assert Work(operations=200e12, read=1e12).seconds(DEVICE) == 2
    assert Work(operations=200e12, read=3e12).seconds(DEVICE) == 3


def test_decoding_reads_the_weights_for_every_round_and_computes_every_token() -> None:
    work = case().decoding("target", 10, (50, 30), 4)
    assert work.read == 3 * 30 * case().read_bytes("target")
    assert work.operations == case().target.operations(10 * 80, 10 * 30)


def test_weights_in_files_of_that_dtype_are_no_memory_of_the_process() -> None:
    stored = Shape(LLAMA_8B, 8_030_261_248, torch.bfloat16)
    mapped = replace(case(), target=stored, mapped=True)
    assert mapped.served("target") == 0
    assert replace(mapped, dtype=torch.float32).served("target") == 4 * stored.weights
    assert replace(mapped, mapped=False).served("target") == 2 * stored.weights


def test_shapes_of_what_is_given_cut_and_made(tmp_path: Path) -> None:
    save_pairs(tmp_path)
    given = compose_config(["+experiment=pair", "data.path=rows.jsonl", *paths(tmp_path / "pair")])
    target, draft = pair_shapes(given)
    for shape, name in ((target, "target"), (draft, "draft")):
        model = load_model(
            getattr(given, name), name, dtype=torch.float32, device=torch.device("cpu")
        )
        assert shape.weights == sum(weight.numel() for weight in model.parameters())
    cut, made = compose_config([]), compose_config(["target=fresh", "draft=fresh"])
    whole, first = pair_shapes(cut)
    assert (whole.layers, first.layers) == (10, 1)
    assert whole.body == pytest.approx(10 * first.body, rel=1e-3)
    assert [shape.layers for shape in pair_shapes(made)] == [8, 2]


def test_a_prefix_of_layers_is_cut_of_a_model_with_kinds_of_layers(tmp_path: Path) -> None:
    save_pairs(tmp_path)
    tiny.model("gemma2").save_pretrained(tmp_path / "kinds")
    config = compose_config(
        [f"target.path={tmp_path / 'kinds'}", "draft.shrink.layers=[1]", "draft.shrink.steps=0"]
    )
    target, draft = pair_shapes(config)
    assert draft.layers == 1 < target.layers
