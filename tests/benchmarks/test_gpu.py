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
def summaries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What both benchmarks say of random models, here tiny ones on a CPU in float32."""
    monkeypatch.setattr("draftkit.evaluation.costs.BURST", 3)
    monkeypatch.setattr("draftkit.evaluation.costs.SETTLING", 1)
    for script in (decoder, training):
        monkeypatch.setattr(script, "TARGET", ("8B", TINY))
        monkeypatch.setattr(script, "DRAFTERS", dict.fromkeys(("1B", "0.15B"), TINY))
    monkeypatch.setattr(decoder, "BATCH_SIZES", {"cpu": (1, 2)})
    monkeypatch.setattr(decoder, "PROMPTS", 6)
    monkeypatch.setattr(decoder, "MAX_NEW_TOKENS", 6)
    small = ["hardware=cpu", "optim.per_device_train_batch_size=2", "data.prompt_tokens=6"]
    small += ["data.max_length=12"]
    config = compose_config(["+experiment=bench_gpu", *small])
    measured = decoder.random_points(config, StageFolder(tmp_path, Tracker(tmp_path)))
    return {"decoder": {"random": measured}, "training": {"random": training.random_steps(config)}}


def test_parts_that_fail_or_do_not_end_cost_themselves_alone(
    summaries: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The numbers of all others lie in one file, and stand in one table."""
    for name in ("8B, 1B", "8B, 0.15B"):
        measured = summaries["decoder"]["random"][name]
        point = measured["points"][1]
        costs = 4 * point["cost_ratio"] + point["verify_ratio"] + point["overhead_ratio"]
        assert measured["likely_speedup"] == pytest.approx((1 - 0.8**5) / (1 - 0.8) / costs)
        assert measured["fraction_of_copy"] > 0
        assert summaries["training"]["random"][name]["tokens_per_second"] > 0
    folder = gpu.folder_of("training", tmp_path)
    folder.mkdir(parents=True)
    write_json(folder / "summary.json", {"stale": True})
    write_json(folder / "made", summaries["training"] | {"ratio_to_trl": 2.5})
    write_json(folder / "manifest.json", {"provenance": {"git_commit": "abc"}})
    report = '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="0"/></testsuites>'
    tests = gpu.folder_of("tests", tmp_path) / "tests.xml"
    codes = {
        "tests": f"from pathlib import Path; Path({str(tests)!r}).write_text('{report}'); exit(1)",
        "decoder": "import time; time.sleep(600)",
        "training": f"import os; os.chdir({str(folder)!r}); os.rename('made', 'summary.json')",
    }
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
    ends = {part: result["status"] for part, result in results.items()}
    assert ends == {
        "tests": "failed with exit code 1",
        "decoder": "out of time",
        "training": "complete",
    }
    assert results["tests"]["failures"] == 1
    assert results["training"]["provenance"] == {"git_commit": "abc"}
    shown = capsys.readouterr().out
    for words in ("failures", "out of time", "ratio_to_trl", "2.500", "8B, 0.15B"):
        assert words in shown
    whole = {"decoder": {"status": "complete", "seconds": 1.0, "summary": summaries["decoder"]}}
    shown = dict(gpu.rows(whole))
    assert float(shown["  8B, 1B: fraction_of_copy"]) > 0
    assert float(shown["  8B, 0.15B: likely_speedup"]) > 0


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
