"""A target in 4 bits: its weights, the product that reads them, and what it refuses."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import GraphModule

from draftkit.api import load_pair
from draftkit.config import HardwareConfig, SamplingConfig, TargetConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import finish, make_requests
from draftkit.decoding.pieces import _join_products, by_layers
from draftkit.models.files import model_sha256
from draftkit.models.loading import load_target, save_model, save_rounded
from draftkit.models.rounded import GROUP, LEVELS, MOST_TOKENS, Packed, grid, is_packed, weights_of
from pipelines.configuration import compose_config
from pipelines.product import rounded
from tests import tiny

HARDWARE = HardwareConfig(device="cpu", dtype="bfloat16")
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetConfig, TargetConfig]:
    """A target, and the same in 4 bits."""
    root = tmp_path_factory.mktemp("rounded")
    whole = TargetConfig(path=str(root / "whole"))
    save_model(tiny.model("llama", **SHAPE), tiny.byte_tokenizer(), root / "whole")
    save_rounded(whole, root / "rounded")
    return whole, TargetConfig(path=str(root / "rounded"))


def packed(model: nn.Module) -> list[Packed]:
    return [module for module in model.modules() if isinstance(module, Packed)]


def test_a_weight_is_the_nearest_of_sixteen_and_those_on_a_grid_come_back() -> None:
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 4 * GROUP, generator=noise).bfloat16()
    levels, grids = grid(weight)
    found = weights_of(levels, grids).float().unflatten(-1, (-1, GROUP))
    groups = weight.float().unflatten(-1, (-1, GROUP))
    step = (groups.amax(-1) - groups.amin(-1))[..., None] / 15
    assert ((found - groups).abs() <= 0.55 * step + 0.01).all()
    assert levels.unique().tolist() == [*range(16)]
    on_grid = (torch.arange(16).repeat(2) * 0.25 - 1.5).repeat(3, 1)
    assert torch.equal(weights_of(*grid(on_grid)).float(), on_grid)
    alike = torch.full((3, GROUP), 0.75)
    assert torch.equal(weights_of(*grid(alike)).float(), alike)


def test_the_product_reads_the_very_weights_that_everything_else_does(folders: Any) -> None:
    model = load_target(folders[1], HARDWARE).adapter.model
    made = packed(model)
    assert len(made) == 7 * model.config.num_hidden_layers
    whole = load_target(folders[0], HARDWARE).adapter.model
    assert (is_packed(model), is_packed(whole)) == (True, False)
    for module in made:
        ones = torch.eye(module.in_features, dtype=torch.bfloat16)
        with torch.inference_mode():
            rows = [module(one) for one in ones.split(MOST_TOKENS)]
        assert torch.equal(torch.cat(rows).T, module.weight)


def test_a_pass_of_few_tokens_is_that_of_the_weights_but_for_rounding(folders: Any) -> None:
    target = load_target(folders[1], HARDWARE).adapter
    exact = load_target(folders[1], HardwareConfig(device="cpu", dtype="float32")).adapter
    texts = tiny.tokens(rows=1, length=MOST_TOKENS)
    keep = torch.ones_like(texts, dtype=torch.bool)

    def error(logits: Tensor) -> float:
        return float((logits.float() - expected).abs().max() / expected.abs().max())

    with torch.inference_mode():
        expected = exact.score(texts, keep)
        few = error(target.score(texts, keep))
        for module in packed(target.model):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        whole = error(target.score(texts, keep))
    assert few < 2 * whole + 0.01


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_added(bias: bool) -> None:
    module = nn.Linear(GROUP, 16, bias=bias, dtype=torch.bfloat16)
    levels, grids = grid(module.weight.data)
    module.weight.data.copy_(weights_of(levels, grids))
    states = torch.randn(2, GROUP, dtype=torch.bfloat16)
    expected = module(states)
    module.__class__ = Packed  # type: ignore[assignment]
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    module.packed, module.grids = convert(levels.int(), 1), grids  # type: ignore[attr-defined]
    with torch.no_grad():
        torch.testing.assert_close(module(states), expected, atol=0.02, rtol=0.02)


class Projections(nn.Module):
    """Four matrices that read the same states: all but the last have whole blocks of outputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, outputs in {"q": 128, "k": 64, "v": 64, "short": 48}.items():
            matrix = nn.Linear(2 * GROUP, outputs, bias=name == "k", dtype=torch.bfloat16)
            levels, grids = grid(matrix.weight.data)
            matrix.__class__ = Packed  # type: ignore[assignment]
            convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
            matrix.packed, matrix.grids = convert(levels.int(), 1), grids  # type: ignore[assignment]
            self.add_module(name, matrix)

    def forward(self, states: Tensor) -> list[Tensor]:
        return [matrix(states) for matrix in self.children()]


@pytest.mark.parametrize("tokens", [1, 4])
def test_products_of_the_same_states_are_one_to_the_last_bit(tokens: int) -> None:
    module, states = Projections(), torch.randn(1, tokens, 2 * GROUP, dtype=torch.bfloat16)
    seen: list[int] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        seen.append(len(_join_products(GraphModule(graph, copy.deepcopy(graph.graph)))))
        return by_layers(graph, inputs, packs=True)

    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            for found, own in zip(compiled(states), module(states), strict=True):
                torch.testing.assert_close(found, own, rtol=0, atol=0)
            module.get_submodule("v").packed.bitwise_not_()  # type: ignore[operator]
    assert seen == [2]  # one product for q, k and v: levels and grids


def test_levels_that_are_too_large_to_be_held_twice_leave_the_other_weights_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = nn.Linear(2 * GROUP, 64, bias=False, dtype=torch.bfloat16)
    module, seen = nn.ModuleList([Projections(), head]), list[int]()

    def backend(graph: GraphModule, inputs: Any) -> Any:
        for room in (head.weight.nbytes - 1, head.weight.nbytes, 1 << 20):
            monkeypatch.setattr("draftkit.decoding.pieces.PACK_BYTES", room)
            seen.append(len(_join_products(GraphModule(graph, copy.deepcopy(graph.graph)))))
        return graph

    with torch.no_grad():
        torch.compile(lambda states: [one(states) for one in module], backend=backend)(
            torch.randn(1, 4, 2 * GROUP, dtype=torch.bfloat16)
        )
    assert seen == [0, 1, 3]  # of 8,192 bytes of weights and 10,240 of levels and grids


@pytest.mark.parametrize("compiled", [False, True])
def test_greedy_answers_are_those_of_the_rounded_weights(folders: Any, compiled: bool) -> None:
    """By rounds of one token, which read the levels, and by the weights themselves."""
    target = load_target(folders[1], HARDWARE)
    (request,) = make_requests(
        tiny.prompts([9]), max_new_tokens=12, sampling=SamplingConfig(temperature=0.0)
    )
    decoder = Decoder(target.adapter, slots=1, capacity=32, compiled=compiled)
    (by_levels,) = finish(decoder, [request])
    ids = torch.tensor([request.prompt_ids + by_levels.output_ids])
    with torch.inference_mode():
        logits = target.adapter.score(ids, torch.ones_like(ids, dtype=torch.bool)).float()
    for at, token in enumerate(by_levels.output_ids, start=len(request.prompt_ids) - 1):
        assert logits[at].max() - logits[at, token] < 0.05 * logits[at].abs().max()


def test_another_model_has_another_address_and_the_same_folder_serves_all(
    folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"target.path={folders[0].path}", "target.weights=int4", f"root={tmp_path}"]
    target = compose_config(words).target
    assert (target.weights, Path(str(target.path)).name) == ("auto", "whole")
    assert capsys.readouterr().out.count("rounded once, into") == 1
    assert model_sha256(Path(str(target.path))) == model_sha256(Path(folders[1].path))
    assert model_sha256(Path(str(target.path))) != model_sha256(Path(folders[0].path))
    assert compose_config(words).target == target
    assert "read from" in capsys.readouterr().out
    assert rounded(target, str(tmp_path)) == (target, "")


def test_a_drafter_cut_from_it_learns_plain_weights(folders: Any) -> None:
    pair = load_pair(folders[1].path, folders[1].path)
    assert packed(pair.target.adapter.model)
    assert not packed(pair.draft.model)


def test_what_cannot_be_rounded_or_is_damaged_is_refused_in_one_line(
    folders: Any, tmp_path: Path
) -> None:
    save_model(tiny.model("gpt2"), tiny.byte_tokenizer(), tmp_path / "gpt2")
    given = TargetConfig(path=str(tmp_path / "gpt2"))
    with pytest.raises(ValueError, match=r"^target\.path [^\n]*gpt2 can be rounded: use target\."):
        save_rounded(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"^target\.weights=int4: [^\n]*save_rounded"):
        load_target(replace(folders[0], weights="int4"), HARDWARE)
    save_rounded(folders[0], damaged := tmp_path / "damaged")
    whole = load_file(damaged / LEVELS)
    name = next(name for name in whole if name.endswith(".levels"))
    for stored in (
        {key: part for key, part in whole.items() if key != name},
        whole | {name: whole[name] ^ 1},  # one level beside the right one
    ):
        save_file(stored, damaged / LEVELS)
        with pytest.raises(ValueError, match=r"^target\.path [^\n]*damaged: cannot load the model"):
            load_target(TargetConfig(path=str(damaged)), HARDWARE)
