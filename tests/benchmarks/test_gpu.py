"""What a GPU is measured with, on a CPU in tiny shapes; and parts that fail or do not end."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from draftkit.tracking import Tracker, read_metrics
from pipelines.benchmarks import decoder, gpu, training
from pipelines.benchmarks.decoder import Grid
from pipelines.benchmarks.random_models import shape
from pipelines.configuration import compose_config
from pipelines.plan import StageFolder

TINY = shape(1, 32, 64, 4, 128)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    """The experiment, on a CPU in float32; random models are tiny."""
    monkeypatch.setattr("draftkit.evaluation.costs.BURST", 3)
    monkeypatch.setattr("draftkit.evaluation.costs.SETTLING", 1)
    for script in (decoder, training):
        monkeypatch.setattr(script, "TARGET", ("8B", TINY))
        monkeypatch.setattr(script, "DRAFTERS", dict.fromkeys(("1B", "0.15B"), TINY))
        monkeypatch.setattr(script, "VOCAB_SIZE", 300)
    monkeypatch.setattr(decoder, "RANDOM", Grid(decoder.RANDOM.methods, (1,), (1, 2)))
    monkeypatch.setattr(decoder, "PROMPTS", 6)
    monkeypatch.setattr(decoder, "MAX_NEW_TOKENS", 6)
    small = ["hardware=cpu", "optim.per_device_train_batch_size=2", "data.prompt_tokens=6"]
    small += ["data.max_length=12", "decode.compile=false"]
    return compose_config(["+experiment=bench_gpu", *small])


@pytest.fixture
def summaries(config: Config, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What both benchmarks say of random models."""
    folder = StageFolder(tmp_path, Tracker(tmp_path))
    measured = decoder.random_points(config, folder)
    return {"decoder": {"random": measured}, "training": {"random": training.random_steps(config)}}


def test_both_benchmarks_take_random_models_of_a_target_and_its_drafters(
    summaries: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    names = ["8B, 1B", "8B, 0.15B"]
    for measured in summaries.values():
        assert list(measured["random"]) == names
    for name in names:
        measured = summaries["decoder"]["random"][name]
        methods = [(point["batch_size"], point["method"]) for point in measured["points"]]
        alone = ["plain", "speculative", "hf_plain", "hf_assisted"]
        expected = [*((1, name) for name in alone), *((2, name) for name in alone[:3])]
        assert methods == expected
        point = measured["points"][1]
        costs = 4 * point["cost_ratio"] + point["verify_ratio"] + point["overhead_ratio"]
        assert point["likely_speedup"] == pytest.approx((1 - 0.8**5) / (1 - 0.8) / costs)
        assert measured["bandwidth"]["fraction"] > 0
        steps = summaries["training"]["random"][name]
        assert steps["tokens_per_second"] > 0
        assert steps["peak_memory_bytes"] > 0
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2 * 7


def test_parts_that_fail_or_do_not_end_cost_themselves_alone(
    summaries: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their numbers and what others measured lie in one file, and stand in one table."""
    for part, summary in summaries.items():
        folder = tmp_path / f"bench_gpu_{part}" / "benchmark"
        folder.mkdir(parents=True)
        write_json(folder / "summary.json", {"stale": True})
        write_json(folder / "made", summary | {"ratio_to_trl": 2.5})
        write_json(folder / "manifest.json", {"provenance": {"git_commit": "abc"}})
    line = {"section": "benchmark_plain", "batch_size": 1, "tokens_per_second": 815.0}
    (tmp_path / "bench_gpu_decoder" / "benchmark" / "line").write_text(json.dumps(line) + "\n")
    move = "import os, time; os.chdir('../bench_gpu_{0}/benchmark'); os.rename('{1}', '{2}')"
    report = '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="0"/></testsuites>'
    codes = {
        "tests": f"from pathlib import Path; Path('tests.xml').write_text('{report}'); exit(1)",
        "decoder": move.format("decoder", "line", "metrics.jsonl") + "; time.sleep(600)",
        "training": move.format("training", "made", "summary.json"),
    }
    monkeypatch.setattr(gpu, "command_of", lambda part, root: [sys.executable, "-c", codes[part]])
    monkeypatch.setattr(gpu, "CONF_DIR", tmp_path / "bench_gpu" / "conf")
    monkeypatch.setattr(gpu, "LIMITS", {"tests": 60.0, "decoder": 3.0, "training": 60.0})
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
    for words in ("failures", "benchmark_plain, batch 1", "815 tokens/s", "ratio_to_trl", "2.500"):
        assert words in shown
    whole = {"decoder": {"status": "complete", "seconds": 1.0, "summary": summaries["decoder"]}}
    assert any("x at alpha 0.8" in line for _, line in gpu.rows(whole))


def test_an_unknown_part_and_an_absent_gpu_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for parts, line in (
        (["speed"], "gpu: there is no part speed: tests, decoder, training\n"),
        ([], "gpu: hardware.device=cuda: no CUDA device is visible; use hardware=cpu\n"),
    ):
        with pytest.raises(SystemExit) as end:
            gpu.main(parts)
        assert (end.value.code, capsys.readouterr().err) == (2, line)


def test_the_commands_of_the_parts_are_those_of_the_documents(tmp_path: Path) -> None:
    assert gpu.command_of("tests", tmp_path)[1:5] == ["-m", "pytest", "-m", "gpu"]
    for part in ("decoder", "training"):
        words = gpu.command_of(part, tmp_path)
        assert words[1:4] == ["-m", f"pipelines.benchmarks.{part}", "+experiment=bench_gpu"]
        assert f"name=bench_gpu_{part}" in words
