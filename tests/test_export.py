"""`export`: the plain folder and how engines load it, from a pair that is given or trained."""

from pathlib import Path

import pytest
import torch

from draftkit.artifacts import read_json
from pipelines.command import launch
from pipelines.plan import EXPORT
from pipelines.product import SUMMARY, plan
from tests.engines import making
from tests.engines.heads import fitted
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


def test_medusa_is_refused_in_one_line_and_nothing_is_made(tmp_path: Path) -> None:
    config = smoke(tmp_path, "draft.kind=medusa")
    with pytest.raises(ValueError, match=r"^draft\.kind=medusa: no engine loads Medusa heads any"):
        launch(EXPORT, config)
    assert not plan(EXPORT, config).folder.exists()


def test_a_given_head_is_written_for_the_engines_that_load_it(tmp_path: Path) -> None:
    model = making.model(vocab_size=REAL + 5, num_hidden_layers=7, num_key_value_heads=4)
    making.saved(model, tmp_path / "target")
    head = fitted(model, torch.arange(48).view(2, 24), ids=torch.arange(30), wide=16)
    head.write(tmp_path / "head")
    words = [f"target.path={tmp_path / 'target'}", f"draft.path={tmp_path / 'head'}"]
    config = smoke(tmp_path, *words, "evaluate.draft=given", "decode.gamma=3")
    launch(EXPORT, config)
    folder = plan(EXPORT, config).folder
    assert read_json(folder / SUMMARY)["engines"].keys() == {"vllm", "sglang", "llamacpp"}
    assert '"method": "eagle3"' in (folder / "launch.md").read_text()
    assert "a head on the target's hidden states" in (folder / "hf" / "README.md").read_text()
    assert (folder / "hf" / "model.safetensors").is_file()
