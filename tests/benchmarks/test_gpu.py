"""What a GPU is measured with, on a CPU in tiny shapes; and parts that fail or do not end."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftkit.artifacts import read_json, write_json
from draftkit.tracking import Tracker
from pipelines.benchmarks import decoder, gpu, training
from pipelines.benchmarks.random_models import shape
from pipelines.configuration import compose_config
from pipelines.stage import StageFolder

TINY = shape(1, 32, 64, 4, vocab_size=300)


@pytest.fixture
def random(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What both benchmarks measure of random models, here tiny ones on a CPU in float32."""
    monkeypatch.setattr("draftkit.evaluation.costs.BURST", 3)
    monkeypatch.setattr("draftkit.evaluation.costs.SETTLING", 1)
    for script in (decoder, training):
        monkeypatch.setattr(script, "TARGET", ("8B", TINY))
        monkeypatch.setattr(script, "DRAFTERS", dict.fromkeys(("1B", "0.15B"), TINY))
    monkeypatch.setattr(decoder, "CASES", {"cpu": decoder.CASES["cuda"]})
    for name, value in {"PROMPTS": 2, "MIN_CHUNKS": 2, "MAX_NEW_TOKENS": 6}.items():
        monkeypatch.setattr(decoder, name, value)
    small = ["hardware=cpu", "optim.per_device_train_batch_size=2", "data.prompt_tokens=6"]
    small += ["data.max_length=12"]
    config = compose_config(["+experiment=bench_gpu", *small])
    points = decoder.random_points(config, StageFolder(tmp_path, Tracker(tmp_path)))
    return {"decoder": points, "training": training.random_steps(config)}


def test_parts_that_fail_or_do_not_end_cost_themselves_alone(
    random: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The numbers of all others lie in one file, and stand in one table."""
    for name in ("8B, 1B", "8B, 0.15B"):
        measured = random["decoder"][name]
        point = measured["points"][1]
        costs = 4 * point["cost_ratio"] + point["verify_ratio"] + point["overhead_ratio"]
        assert measured["likely_speedup"] == pytest.approx((1 - 0.8**5) / (1 - 0.8) / costs)
        assert measured["weight_bytes_per_second"] > 0
        assert random["training"][name]["tokens_per_second"] > 0
    for part in ("decoder", "training"):  # of the first lies what an earlier run has left
        folder = tmp_path / f"bench_gpu_{part}" / "benchmark"
        write_json(folder / "summary.json", {"random": random[part], "ratio_to_trl": 2.5})
        write_json(folder / "manifest.json", {"provenance": {"git_commit": "abc"}})
    codes = {"tests": "exit(1)", "decoder": "import time; time.sleep(600)", "training": ""}
    monkeypatch.setattr(gpu, "command_of", lambda part, root: [sys.executable, "-c", codes[part]])
    monkeypatch.setattr(gpu, "LIMITS", {"tests": 60.0, "decoder": 1.0, "training": 60.0})
    monkeypatch.setattr(gpu, "resolve_device", lambda hardware: None)
    composed = compose_config([f"root={tmp_path}"])
    monkeypatch.setattr(gpu, "compose_config", lambda words: composed)
    started = time.monotonic()
    with pytest.raises(SystemExit) as end:
        gpu.main([])
    assert end.value.code == 1
    assert time.monotonic() - started < 60
    results = read_json(tmp_path / "bench_gpu" / "gpu.json")
    assert {part: result["status"] for part, result in results.items()} == {
        "tests": "failed with exit code 1",
        "decoder": "out of time",
        "training": "complete",
    }
    assert "summary" not in results["decoder"]
    assert results["training"]["provenance"] == {"git_commit": "abc"}
    shown = capsys.readouterr().out
    for words in ("tests: failed with exit code 1 in ", "ratio_to_trl          2.500"):
        assert words in shown


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["speed"], "gpu: there is no part speed: tests, decoder, training\n"),
        ([], "gpu: hardware.device=cuda: no CUDA device is visible; use hardware=cpu\n"),
    ],
)
def test_an_unknown_part_and_an_absent_gpu_are_one_line(
    parts: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        gpu.main(parts)
    assert (end.value.code, capsys.readouterr().err) == (2, words)


def test_the_commands_of_the_parts_are_those_of_the_documents(tmp_path: Path) -> None:
    assert gpu.command_of("tests", tmp_path)[1:5] == ["-m", "pytest", "-m", "gpu"]
    for part in ("decoder", "training"):
        words = gpu.command_of(part, tmp_path)
        assert words[1:4] == ["-m", f"pipelines.benchmarks.{part}", "+experiment=bench_gpu"]
        assert f"name=bench_gpu_{part}" in words
