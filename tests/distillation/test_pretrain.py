"""A model that nobody gave learns its text, new or cut out of the target, and is saved whole."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from draftkit.config import Config, DraftConfig, HardwareConfig, PretrainConfig, TargetConfig
from draftkit.config.text import ShrinkConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.splits import Splits
from draftkit.distillation.pretrain import full_rows, make_draft, new_model
from draftkit.distillation.ranks import agree
from draftkit.models.files import KEPT_IDS
from draftkit.models.loading import load_model, save_model
from draftkit.models.shrink import read_kept_ids
from draftkit.tracking import Tracker, read_metrics
from tests import tiny
from tests.launching import fork_ranks

SHAPE = PretrainConfig(
    hidden_size=32,
    num_hidden_layers=3,
    per_device_train_batch_size=4,
    max_steps=4,
    learning_rate=1e-2,
)


def example(ids: list[int]) -> Example:
    return Example(ids, [True] * len(ids), "", "")


TEXT = example([1, 2, 3, 4] * 4)
SPLITS = Splits([TEXT] * 8, [TEXT], [TEXT], "", {}, Room(64, 64))
CPU = torch.device("cpu")


@pytest.fixture
def target(tmp_path: Path) -> TargetConfig:
    tokenizer = tiny.byte_tokenizer()
    save_model(
        new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU),
        tokenizer,
        tmp_path / "target",
    )
    return TargetConfig(path=str(tmp_path / "target"))


def losses(target: TargetConfig, folder: Path, steps: int = 4, **draft: object) -> list[float]:
    """Those of the drafter of section `draft`, which is then in `folder`."""
    folder.mkdir(exist_ok=True)
    shape = replace(SHAPE, num_hidden_layers=1, max_steps=steps)
    section = replace(DraftConfig(pretrain=shape), **draft)
    make_draft(
        Config(hardware=HardwareConfig(device="cpu", dtype="float32"), draft=section),
        target,
        SPLITS,
        folder,
        tracker=Tracker(folder),
        note=lambda line: None,
    )
    assert not (folder / "draft-training").exists()
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def model_in(folder: Path) -> PreTrainedModel:
    path = DraftConfig(path=str(folder / "draft"))
    return load_model(path, dtype=torch.float32, device=CPU)


def test_a_drafter_is_new_or_cut_and_trained_as_long_as_it_is_to_be(
    target: TargetConfig, tmp_path: Path
) -> None:
    whole = load_model(target, dtype=torch.float32, device=CPU)
    cut, trained = tmp_path / "cut", tmp_path / "trained"
    assert losses(target, cut, shrink=ShrinkConfig(layers=[0, 2])) == []
    assert model_in(cut).config.num_hidden_layers == 2
    for name, weight in model_in(cut).named_parameters():
        same = whole.get_parameter(name.replace("layers.1.", "layers.2."))
        assert torch.equal(weight, same), name
    assert losses(target, trained, shrink=ShrinkConfig(layers=[0], steps=3))
    assert read_metrics(trained / "metrics.jsonl")[-1]["step"] == 3
    assert model_in(trained).config.num_hidden_layers == 1
    assert not torch.equal(
        model_in(trained).get_input_embeddings().weight, whole.get_input_embeddings().weight
    )


def weights(folder: Path) -> list[float]:
    """A number of each weight of the trained drafter."""
    assert model_in(folder).config.num_hidden_layers == 1
    return [float(weight.detach().sum()) for weight in model_in(folder).parameters()]


def read_by_all(target: TargetConfig, folder: Path) -> list[float]:
    """What each of two processes reads of the model that the first has trained."""
    if os.environ["RANK"] == "0":
        losses(target, folder, steps=30)
    agree("it is there")
    return weights(folder)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_model_learns_and_is_saved_whole_by_one_of_several_processes(
    target: TargetConfig, tmp_path: Path
) -> None:
    alone, launched = tmp_path / "alone", tmp_path / "launched"
    first, *_, last = losses(target, alone, steps=30)
    assert last < 0.5 * first
    expected = pytest.approx(weights(alone), rel=1e-3)
    assert fork_ranks(read_by_all, target, launched) == 2 * [expected]


def test_rows_are_full_and_long_texts_stay_whole() -> None:
    texts = [[1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14, 15]]
    rows = full_rows([example(ids) for ids in texts], length=4)
    assert rows.tolist() == [[3, 4, 5, 6], [10, 11, 12, 13], [1, 2, 7, 8]]  # 9, 14, 15 fill none
    assert full_rows([example([1, 2])], length=4).tolist() == [[1, 2]]


def test_what_a_draft_cannot_propose_it_is_not_taught(target: TargetConfig, tmp_path: Path) -> None:
    """Its loss would be infinite; the rest of the text is learned."""
    cut = ShrinkConfig(layers=[0], steps=3, vocabulary=3)
    assert all(math.isfinite(loss) for loss in losses(target, tmp_path / "few", shrink=cut))
    end = tiny.byte_tokenizer().eos_token_id
    kept = read_kept_ids(tmp_path / "few" / "draft" / KEPT_IDS, 300).tolist()
    assert len(kept) == 4  # three of the text, and its end
    assert {end} < {*kept} <= {1, 2, 3, 4, end}
