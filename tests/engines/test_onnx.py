"""The pair of ONNX Runtime GenAI: its builder makes both models, one configuration joins them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import ModelConfig, SamplingConfig
from tests.engines import making
from tests.engines.onnx import joined, write_onnx_pair

# Stands for the engine's own: writes what it is called with, in the shape of builder 0.18.0.
BUILDER = """
import json, sys
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "broken" in options["-i"]:
    print("noise", file=sys.stderr)
    raise SystemExit("NotImplementedError: no such architecture")
folder = Path(options["-o"])
folder.mkdir(parents=True)
config = json.loads((Path(options["-i"]) / "config.json").read_text())
decoder = {"filename": "model.onnx", "num_hidden_layers": config["num_hidden_layers"]}
model = {"decoder": decoder, "vocab_size": config["vocab_size"], "type": "llama"}
model["context_length"] = config["max_position_embeddings"]
search = {"top_k": 50, "num_beams": 1, "max_length": model["context_length"]}
(folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}))
(folder / "model.onnx").write_text(json.dumps(options))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has a builder."""
    package = tmp_path / "site" / "onnxruntime_genai" / "models"
    package.mkdir(parents=True)
    (package / "builder.py").write_text(BUILDER)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script


def written(folder: Path, python: Path, name: str = "draft", **sampling: Any) -> dict[str, Any]:
    target = making.saved(making.model(max_position_embeddings=256), folder / "target")
    making.saved(making.model(num_hidden_layers=1), folder / name)
    write_onnx_pair(
        target,
        folder / name,
        folder / "onnx",
        python=python,
        precision="fp32",
        gamma=3,
        sampling=SamplingConfig(**sampling),
    )
    return json.loads((folder / "onnx" / "genai_config.json").read_text())


def test_both_models_are_built_and_joined(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)  # folders may be relative, as those below `root` are
    config = written(Path(tmp_path.name), python, temperature=0.7, top_k=20)
    model = config["model"]
    assert model["decoder"] == {"filename": "target/model.onnx", "num_hidden_layers": 2}
    assert model["draft"] == {"filename": "draft/model.onnx", "num_hidden_layers": 1}
    assert model["context_length"] == config["search"]["max_length"] == 128
    assert config["speculative"] == {"max_draft_tokens": 3}
    served = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1.0, "num_beams": 1}
    assert served.items() <= config["search"].items()
    for name in ("target", "draft"):
        options = json.loads((tmp_path / "onnx" / name / "model.onnx").read_text())
        assert options["-i"] == str(tmp_path / name)
        assert (options["-p"], options["-e"]) == ("fp32", "cpu")
    own, copied = tmp_path / "target" / "tokenizer.json", tmp_path / "onnx" / "tokenizer.json"
    assert own.read_bytes() == copied.read_bytes()


def test_greedy_serving_samples_nothing() -> None:
    model = {"decoder": {"filename": "m"}, "vocab_size": 9, "context_length": 8}
    part = {"model": model, "search": {}}
    search = joined(part, part, gamma=40, sampling=SamplingConfig(temperature=0))
    assert search["search"]["do_sample"] is False
    assert search["speculative"] == {"max_draft_tokens": 16}


def test_what_the_builder_refuses_is_said_in_its_words(tmp_path: Path, python: Path) -> None:
    with pytest.raises(ValueError, match=r"^draft\.path: .*no such architecture"):
        written(tmp_path, python, "broken")
    assert not (tmp_path / "onnx").exists()


def test_the_model_of_a_hub_is_named(tmp_path: Path, python: Path, monkeypatch: Any) -> None:
    calls: list[list[str]] = []

    def build(python: list[str], source: list[str], folder: Path, *rest: str) -> None:
        calls.append(source)
        raise ValueError("stop")

    monkeypatch.setattr("tests.engines.onnx.build", build)
    options: dict[str, Any] = {"python": python, "precision": "int4", "gamma": 1}
    with pytest.raises(ValueError, match="stop"):
        write_onnx_pair(
            ModelConfig(path="some/target"),
            tmp_path,
            tmp_path / "o",
            sampling=SamplingConfig(),
            **options,
        )
    assert calls == [["-m", "some/target"]]
