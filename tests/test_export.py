"""`export`: the folders for each engine, from a pair that is given or trained."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftkit.artifacts import read_json, sha256_file
from draftkit.config import Config
from pipelines.export import at_batch, export
from pipelines.plan import SUMMARY, ordered
from tests.engines import making
from tests.engines.making import REAL
from tests.smoke import smoke

ALL = "export.engines=[vllm,sglang,llamacpp]"


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
    folder = folder_of(smoke(tmp_path, *given, ALL, "export.gguf_types=[f32,q8_0]"))
    summary = read_json(folder / SUMMARY)
    files = {name: folder / name for name in summary["files"]}
    stored = {p.relative_to(folder).as_posix() for p in folder.glob("*/*") if p.is_file()}
    assert stored == files.keys()
    for name, path in files.items():
        assert summary["files"][name]["bytes"] == path.stat().st_size
        assert summary["files"][name]["sha256"] == sha256_file(path)
    assert {file.name for file in (folder / "llamacpp").iterdir()} == {
        *("target-f32.gguf", "target-q8_0.gguf", "draft-f32.gguf", "draft-q8_0.gguf", "launch.sh")
    }
    options = json.loads((folder / "vllm" / "speculative_config.json").read_text())
    assert options["num_speculative_tokens"] == summary["gamma"] == 3
    launched = (folder / "llamacpp" / "launch.sh").read_text()
    assert "-m llamacpp/target-f32.gguf -md llamacpp/draft-f32.gguf" in launched
    assert f"vllm serve {tmp_path / 'target'} " in (folder / "vllm" / "launch.sh").read_text()
    assert "has not been measured" in (folder / "hf" / "README.md").read_text()
    assert f"note: {summary['notes'][0]}" in capsys.readouterr().out


def test_the_file_of_llama_cpp_holds_the_plain_folder_s_weights(
    tmp_path: Path, given: list[str]
) -> None:
    config = smoke(tmp_path, *given, "export.engines=[llamacpp]", "export.gguf_target=false")
    folder = folder_of(config)
    assert {file.name for file in (folder / "llamacpp").iterdir()} == {
        "draft-q8_0.gguf",
        "launch.sh",
    }
    reader = gguf.GGUFReader(folder / "llamacpp" / "draft-q8_0.gguf")
    tensor = next(one for one in reader.tensors if one.name == "output.weight")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    head = model.get_output_embeddings().weight.detach()
    read = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
    assert read.shape == head.shape == (REAL + 5, 64)
    assert torch.allclose(read, head, atol=float(head.abs().max()) / 200)


def test_nothing_is_made_again_and_another_choice_is_refused(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(smoke(tmp_path, *given))
    folder_of(smoke(tmp_path, *given))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"export\.dtype was None, now 'bfloat16'"):
        export.launch(smoke(tmp_path, *given, "export.dtype=bfloat16"))


def test_a_pair_that_llama_cpp_does_not_know_is_refused_before_anything_is_made(
    tmp_path: Path, given: list[str]
) -> None:
    making.saved(making.model("gpt2"), tmp_path / "draft")
    config = smoke(tmp_path, *given, "export.engines=[llamacpp]")
    with pytest.raises(ValueError, match=r"^draft\.path: GGUF of gpt2, not of llama"):
        export.launch(config)
    assert not export.path(config).exists()
    with pytest.raises(ValueError, match=r"^export\.onnx_python: there is no"):
        export.launch(smoke(tmp_path, *given, "export.engines=[onnx]", "export.onnx_python=x"))


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
