"""`export`: the folders for each engine, from a pair that is given or trained."""

import json
from pathlib import Path

import pytest

from draftkit.artifacts import read_json, sha256_file
from draftkit.config import Config
from pipelines.export import at_batch, export
from pipelines.plan import SUMMARY, ordered
from tests.engines import making
from tests.engines.making import REAL
from tests.smoke import smoke

ALL = "export.engines=[vllm,sglang,llamacpp,onnx]"


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A pair, by the words of a command."""
    making.saved(making.model(vocab_size=REAL + 5), tmp_path / "target")
    making.saved(making.model(num_hidden_layers=1, seed=2), tmp_path / "draft")
    paths = [f"{key}.path={tmp_path / key}" for key in ("target", "draft")]
    return [*paths, "evaluate.draft=given", "decode.gamma=3"]


def folder_of(config: Config) -> Path:
    export.launch(config)
    return export.path(config)


def test_a_given_pair_is_written_for_each_engine(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(smoke(tmp_path, *given, ALL))
    summary = read_json(folder / SUMMARY)
    files = {name: folder / name for name in summary["files"]}
    stored = {p.relative_to(folder).as_posix() for p in folder.glob("*/*") if p.is_file()}
    assert stored == files.keys()
    for name, path in files.items():
        assert summary["files"][name]["bytes"] == path.stat().st_size
        assert summary["files"][name]["sha256"] == sha256_file(path)
    for engine in ("llamacpp", "onnx"):
        converted = (folder / engine / "convert.sh").read_text()
        assert str(tmp_path / "target") in converted
        assert " ./hf " in converted
    options = json.loads((folder / "vllm" / "speculative_config.json").read_text())
    assert options["num_speculative_tokens"] == summary["gamma"] == 3
    assert f"vllm serve {tmp_path / 'target'} " in (folder / "vllm" / "launch.sh").read_text()
    assert "has not been measured" in (folder / "hf" / "README.md").read_text()
    assert f"note: {summary['notes'][0]}" in capsys.readouterr().out


def test_nothing_is_made_again_and_another_choice_is_refused(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(smoke(tmp_path, *given))
    folder_of(smoke(tmp_path, *given))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"export\.dtype was None, now 'bfloat16'"):
        export.launch(smoke(tmp_path, *given, "export.dtype=bfloat16"))


def test_other_batch_sizes_are_evaluated_of_the_same_drafter(tmp_path: Path) -> None:
    config = smoke(
        tmp_path, "export.batch_sizes=[1,2]", "evaluate.timing_prompts=12", "evaluate.prompts=12"
    )
    step = export.step(config)
    name = "evaluation at batch size 2"
    assert [need for need in step.needs if need.startswith("evaluation")] == ["evaluation", name]
    assert "evaluation" not in export.step(smoke(tmp_path)).needs  # which takes what there is
    other = step.needs[name]
    assert other.path.endswith("smoke/evaluate.timing_batch_size=2/evaluate")
    assert at_batch(config, 2).config.evaluate.timing_batch_size == 2
    trained = [one.folder for one in ordered([step]) if one.name == "train"]
    assert trained == [tmp_path / "smoke" / "train"]  # one, of which all sizes are evaluated
