"""A base drafter cut out of the target, given or just trained, as the stage makes it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.data.rollouts import read_parts
from draftkit.models.loading import load_draft, load_target
from draftkit.tracking import read_metrics
from pipelines.command import launch
from pipelines.plan import GENERATE, PREPARE
from pipelines.product import plan
from pipelines.stage import ensure
from tests.smoke import composed, models, splits_of
from tests.trained import trained_target

VOCAB = 300
TEXT = "{0} quick brown foxes jump over {1} lazy dogs, and {2} cats look on in wonder."
SHRUNK = ["draft.shrink.layers=[1]", "draft.shrink.vocabulary=64"]


def smoke(root: Path, *overrides: str) -> Config:
    """The smallest experiment on a small text, in `root`."""
    path = root / "rows.jsonl"
    if not path.exists():
        rows = [{"text": TEXT.format(i, i * 7, i * 13)} for i in range(80)]
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    small = ["data=local", f"data.path={path}", "data.prompt_tokens=4"]
    small += ["target=local", f"target.path={trained_target(*small, vocab_size=VOCAB)}"]
    given = ["+experiment=smoke", f"root={root / 'outputs'}", "tracker=none"]
    small += ["draft.pretrain.max_steps=2"]
    return composed(*given, *small, *overrides)


def test_a_drafter_is_cut_from_the_target(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = smoke(root, *SHRUNK)
    made = ensure(PREPARE, trained)
    target = Path(str(models(trained)[0].path))
    whole, cut = (load_file(path / "model.safetensors") for path in (target, made / "draft"))
    assert read_json(made / "draft" / "config.json")["num_hidden_layers"] == 1
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(cut[name.format(0)], whole[name.format(1)])
    assert not read_metrics(made / "metrics.jsonl")  # no drafter was trained
    assert "% of the validation text" in capsys.readouterr().out
    copied = shutil.copytree(target, root / "copied")
    given = [smoke(root, *SHRUNK, f"target.path={path}") for path in (target, copied)]
    first, other = (plan(PREPARE, one).folder for one in given)
    assert first == other  # the same target, wherever it lies


def test_a_drafter_that_was_cut_is_trained_on_the_text(root: Path) -> None:
    cut, trained = (
        ensure(PREPARE, smoke(root, *SHRUNK, f"draft.shrink.steps={steps}")) for steps in (0, 3)
    )
    assert read_metrics(trained / "metrics.jsonl")[-1]["step"] == 3
    before, after = (load_file(made / "draft" / "model.safetensors") for made in (cut, trained))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    kept = [(made / "draft" / "kept_ids.json").read_text() for made in (cut, trained)]
    assert kept[0] == kept[1]


def test_it_proposes_the_most_frequent_ids_of_the_training_split(root: Path) -> None:
    config = smoke(root, *SHRUNK, "source=fixed")
    target_config, draft_config = models(config)
    target = load_target(target_config, config.hardware)
    draft = load_draft(draft_config, target)
    assert draft.kept_ids is not None
    kept = draft.kept_ids.tolist()
    train = splits_of(config).train
    counts = torch.bincount(torch.tensor([i for e in train for i in e.token_ids]), minlength=VOCAB)
    assert 64 <= len(kept) <= 64 + len(target.eos_token_ids)
    assert set(target.eos_token_ids) <= set(kept)
    others = [token for token in range(len(counts)) if token not in kept]
    assert counts[others].max() <= counts[kept].sort(descending=True).values[63]


def test_ids_are_counted_on_the_targets_answers_where_the_run_has_them(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["draft.shrink.layers=1", "draft.shrink.vocabulary=8"]
    of_text, of_both = (smoke(root, *few, f"source={name}") for name in ("fixed", "target"))
    ensure(PREPARE, of_text)
    assert "own answers" not in capsys.readouterr().out
    made = ensure(PREPARE, of_both)
    note = capsys.readouterr().out
    share = re.search(r"% of the validation text, (\d+)\.(\d)% of the target's own answers", note)
    assert share is not None
    assert "has layers 0 of the target" in note
    kept = read_json(made / "draft" / "kept_ids.json")
    records = read_parts(plan(GENERATE, of_both).folder)
    own = [token for record in records[::10] for token in record.output_ids]
    expected = sum(token in kept for token in own) / len(own)
    assert float(f"{share[1]}.{share[2]}") == pytest.approx(100 * expected, abs=0.06)
    assert kept != read_json(plan(PREPARE, of_text).folder / "draft" / "kept_ids.json")


def test_layers_and_ids_are_part_of_what_was_made(root: Path) -> None:
    paths = {
        plan(PREPARE, smoke(root, *options)).folder
        for options in ([], SHRUNK, ["draft.shrink.layers=[1]"], ["draft.shrink.layers=[0]"])
    }
    assert len(paths) == 4


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("draft.shrink.layers=[0,2]", r"^draft\.shrink\.layers: the target has 2 layers"),
        ("draft.shrink.vocabulary=400", r"^draft\.shrink\.vocabulary: 400 of \d+ ids"),
    ],
)
def test_more_than_the_target_has_is_refused_at_once(
    root: Path, tmp_path: Path, override: str, told: str
) -> None:
    config = smoke(root, *SHRUNK, override, f"root={tmp_path}")
    with pytest.raises(ValueError, match=told) as error:
        launch(PREPARE, config)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("manifest.json"))
