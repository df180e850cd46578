"""`export`: the plain folder and how engines load it, from a pair that is given or trained."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json
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


def test_a_given_pair_is_written_with_the_commands_of_each_engine(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = smoke(tmp_path, *given)
    launch(EXPORT, config)
    folder = plan(EXPORT, config).folder
    summary, text = read_json(folder / SUMMARY), (folder / "launch.md").read_text()
    assert f"vllm serve {tmp_path / 'target'} " in text
    assert '"num_speculative_tokens": 3,' in text
    assert summary["gamma"] == 3
    assert "has not been measured" in (folder / "hf" / "README.md").read_text()
    assert f"note: {summary['notes'][0]}" in capsys.readouterr().out
