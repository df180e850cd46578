"""`export`: the plain folder and how engines load it, from a pair that is given or trained."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from draftkit.config import Config
from pipelines.command import launch
from pipelines.plan import EXPORT
from pipelines.product import SUMMARY, plan
from tests.engines import making
from tests.engines.making import REAL
from tests.smoke import smoke


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A pair, by the words of a command."""
    making.saved(making.model(vocab_size=REAL + 5), tmp_path / "target")
    making.saved(making.model(num_hidden_layers=1, seed=2), tmp_path / "draft")
    paths = [f"{key}.path={tmp_path / key}" for key in ("target", "draft")]
    return [*paths, "evaluate.draft=given", "decode.gamma=3"]


def folder_of(config: Config) -> Path:
    launch(EXPORT, config)
    return plan(EXPORT, config).folder


def test_a_given_pair_is_written_with_the_commands_of_each_engine(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(smoke(tmp_path, *given))
    summary, text = read_json(folder / SUMMARY), (folder / "launch.md").read_text()
    assert f"vllm serve {tmp_path / 'target'} " in text
    assert '"num_speculative_tokens": 3,' in text
    assert summary["gamma"] == 3
    assert "has not been measured" in (folder / "hf" / "README.md").read_text()
    assert f"note: {summary['notes'][0]}" in capsys.readouterr().out


def test_nothing_is_made_again_and_another_choice_is_refused(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(smoke(tmp_path, *given))
    folder_of(smoke(tmp_path, *given))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"export\.dtype was None, now 'bfloat16'"):
        launch(EXPORT, smoke(tmp_path, *given, "export.dtype=bfloat16"))
