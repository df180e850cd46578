"""Any two folders and any file: distilled as they are, refused where they do not fit."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from draftkit.artifacts import read_json
from draftkit.config import Config, SamplingConfig
from draftkit.distillation.pretrain import new_model
from draftkit.models.loading import save_model
from pipelines.command import launch
from pipelines.plan import CONTEXTS, DISTILL, TRAIN
from pipelines.stage import ensure
from tests.smoke import TEXT, same_weights, smoke
from tests.trained import SHAPE, train_byte_bpe

pytestmark = pytest.mark.usefixtures("one_pass")


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A user's own folder: two models, a file of prompts and completions, bad ones beside them."""
    folder = tmp_path_factory.mktemp("own")
    rows = [TEXT.format(i, i * 7, i * 13) for i in range(60)]
    tokenizer = train_byte_bpe(rows, 300)
    config = smoke(folder)
    cpu = torch.device("cpu")
    for name, shape, seed in (
        ("target", SHAPE, 1),
        ("draft", config.draft.pretrain, 2),
    ):
        save_model(
            new_model(shape, tokenizer, LlamaConfig(), seed=seed, device=cpu),
            tokenizer,
            folder / name,
        )
    advice = '{"do_sample": true, "temperature": 0.8, "top_k": 20}'
    (folder / "target" / "generation_config.json").write_text(advice)
    other = train_byte_bpe([row.upper() for row in rows], 300)
    save_model(
        new_model(config.draft.pretrain, other, LlamaConfig(), seed=3, device=cpu),
        other,
        folder / "other",
    )
    with (folder / "rows.jsonl").open("w") as file:
        for i, row in enumerate(rows):
            pair = {"prompt": row[: 20 + i % 9], "completion": row[20 + i % 9 :]}
            file.write(json.dumps(pair) + "\n")
    (folder / "hollow").mkdir()
    return folder


def pair_config(own: Path, root: Path, *overrides: str) -> Config:
    given = [f"target.path={own / 'target'}", f"draft.path={own / 'draft'}"]
    small = ["data=local", f"data.path={own / 'rows.jsonl'}", "name=pair", "source=draft"]
    small += ["data.max_completion_tokens=32"]  # models that are not trained end no text
    small += ["data.test_fraction=0.2"]  # of 60 rows: enough for a verdict
    return smoke(root, *small, *given, "optim.max_steps=4", *overrides)


def test_two_folders_and_a_file_are_enough(own, tmp_path):
    """And are judged as the target's authors advise, which summary and card say."""
    launch(DISTILL, pair_config(own, tmp_path, "sampling.from=model", "sampling.top_p=0.9"))
    summary = read_json(tmp_path / "pair" / "evaluate" / "summary.json")
    assert summary["lossless"]["passed"]
    assert summary["sampling"] == vars(SamplingConfig(temperature=0.8, top_k=20, top_p=0.9))
    assert list(summary["by_temperature"]) == ["0.8"]
    card = (tmp_path / "pair" / "distill" / "draft" / "README.md").read_text()
    assert "temperature 0.8, top-k 20, top-p 0.9, " in card
    settings = read_json(tmp_path / "pair" / "train" / "manifest.json")["settings"]
    assert settings["sampling.top_k"] == 20
    assert "sampling.from" not in settings
    assert summary["before"]["alpha"]["prompts"] == summary["alpha"]["prompts"]
    assert not (tmp_path / "shared" / "prepare").exists()
    assert not (tmp_path / "shared" / "target").exists()


def test_a_run_that_makes_the_drafter_worse_says_so_and_keeps_the_start(own, tmp_path, capsys):
    config = pair_config(own, tmp_path, "optim.learning_rate=3", "optim.warmup_steps=0")
    summary = launch(TRAIN, config)
    assert "no step beat the starting drafter" in capsys.readouterr().out
    assert summary["best_step"] == 0
    assert same_weights(first=tmp_path / "pair" / "train" / "draft", second=own / "draft")


def test_too_few_held_out_documents_for_a_verdict_are_said_before_anything_is_trained(
    own, tmp_path, capsys
):
    many = ["evaluate.timing_batch_size=9", "evaluate.prompts=54", "evaluate.timing_prompts=54"]
    ensure(CONTEXTS, pair_config(own, tmp_path, *many))
    shown = capsys.readouterr().out
    assert " held-out documents will be timed, a verdict needs 180: it will be inconcl" in shown


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("draft.path={own}/other", r"^draft\.path: target and draft have different vocabularies"),
        ("draft.path={own}/hollow", r"^draft\.path .*hollow: holds no config\.json"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_stage_folder(own, tmp_path, override, line):
    with pytest.raises(ValueError, match=line) as error:
        launch(DISTILL, pair_config(own, tmp_path, override.format(own=own)))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("manifest.json"))
