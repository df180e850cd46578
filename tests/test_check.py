"""`check`: the pair, the plan with memory and time, and the refusal of what cannot fit."""

import json
import mmap
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.checking.probes import PROBES, Probe, Spent
from draftkit.checking.shapes import TextLengths
from draftkit.config import Config
from draftkit.models import memory
from draftkit.workflow.progress import duration
from pipelines import check as command
from pipelines import limits, probing
from pipelines.check import check, goal_of, probed
from pipelines.configuration import compose_config
from pipelines.distill import distill
from pipelines.folder import CONFIG
from pipelines.limits import gigabytes
from pipelines.plan import SUMMARY, ordered
from pipelines.texts import texts
from tests.launching import run_forked
from tests.test_prepare import smoke

A_CARD = "check.device={memory: 80, bandwidth: 3350, flops: 990}"
SCORED = ["source=target", "generate.rollouts=8", "generate.top_k=8", "draft.lora.rank=2"]
SCORED += ["evaluate.temperatures=[1.0,0.0]", "optim.rate_factors=[1.0,2.0]"]


def made(config: Config) -> set[str]:
    """The steps of `config` that are complete."""
    steps = ordered([goal_of(config)])
    return {step.name for step in steps if (step.folder / SUMMARY).is_file()}


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.soak), SCORED])
def test_every_step_is_probed_and_none_is_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    monkeypatch.setattr(command.subprocess, "run", run_forked)
    config = smoke(tmp_path, *options)
    check(config)
    assert made(config) == {"texts"}
    shown = capsys.readouterr().out
    for step in ordered([goal_of(config)]):
        folder = str(step.folder.relative_to(config.root))
        line = next(line for line in shown.splitlines() if line.endswith(f"  {folder}"))
        state = "complete" if step.name == "texts" else "to do"
        assert line.startswith(f"  {step.name:<9} {state}")
        assert ("GB" in line) == (step.name in PROBES)
    assert re.search(r"\nfits: .* of \d+ GB, about \d+.* s \(\d+.* s of processor time\)\n", shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_bound_from_shapes_reads_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = smoke(tmp_path, A_CARD)
    check(config)
    assert made(config) == set()
    assert "at least < 0.1 GB of 80 GB, and 0.1 s: computed from shapes" in capsys.readouterr().out
    tiny = smoke(tmp_path, A_CARD.replace("memory: 80", "memory: 0.0001"))
    with pytest.raises(ValueError, match=r"^target takes .* draft\.pretrain$"):
        check(tiny)


def test_a_device_is_given_whole() -> None:
    with pytest.raises(ValueError, match=r"^check\.device must have memory \(GB\), bandwidth"):
        compose_config(["check.device={memory: 80}"])
    with pytest.raises(ValueError, match=r"^check\.device\.flops must be positive"):
        compose_config(["check.device={memory: 80, bandwidth: 1, flops: 0}"])


def test_what_is_judged_as_it_is_trains_nothing() -> None:
    given = compose_config(["+experiment=smoke", "evaluate.draft=given"])
    assert goal_of(given).name == "evaluate"
    assert goal_of(compose_config(["+experiment=smoke"])).name == "distill"


def test_commands_refuse_what_cannot_fit_unless_they_are_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda device: 1000)
    with pytest.raises(
        ValueError, match=r"^target takes .* 1000|are free.*check=off begins anyway"
    ):
        distill.ensure(smoke(tmp_path))
    assert made(smoke(tmp_path)) == set()
    texts.ensure(smoke(tmp_path))  # which needs no model
    limits.refuse_too_large(ordered([distill.step(smoke(tmp_path, "check=off"))]))


def test_what_does_not_fit_is_told_with_the_setting_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = {"start": 5.0, "baseline": 1e9, "free": 4e9}
    target = {"step": "target", "peak": 2e9, "wall": 60.0, "processor": 90.0}
    failed = (begun, {"target": target}, "it ran out of memory")
    monkeypatch.setattr(command, "probed", lambda config, names: failed)
    with pytest.raises(
        ValueError, match=r"^prepare does not fit: it ran out of memory with 4\.0 GB"
    ):
        check(smoke(tmp_path))
    assert "1.0 GB" in capsys.readouterr().out


def test_files_that_the_disk_does_not_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"^drafters and checkpoints take .* use root="):
        check(smoke(tmp_path))


# What engines do with the pair


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """The printed lines, wrapped ones put together."""
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    return re.sub(r"\n {8,}", " ", printed)


def test_engines_are_looked_at_and_refuse_nothing_unless_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["target=embedded", "draft=fresh", A_CARD]  # heads of 8
    check(smoke(tmp_path, *options))
    text = shown(capsys)
    assert "\n  wrong vLLM on CPU  draft: fails with heads of 8: it takes 32, 64" in text
    assert text.count("  ok    transformers loads the pair as it is") == 1
    assert "  wrong SGLang       refuses to start" in text
    named = smoke(tmp_path, *options, "check.engines=[vllm_cpu,llamacpp]")
    with pytest.raises(ValueError, match=r"^check\.engines: vLLM on CPU: draft: fails with heads"):
        check(named)
    assert "  wrong SGLang" not in shown(capsys)
    check(smoke(tmp_path, *options, "check.engines=[llamacpp]"))
    assert "wrong" not in shown(capsys)


def test_devices_that_share_a_model_must_divide_it(tmp_path: Path) -> None:
    options = ["target=embedded", "check.engines=[vllm]", "check.tensor_parallel=3", A_CARD]
    with pytest.raises(ValueError, match=r"target does not divide by 3 \(heads 4, "):
        check(smoke(tmp_path, *options))


def test_an_engine_without_rules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^check\.engines must be one of transformers, vllm, "):
        compose_config(["check.engines=[tgi]"])


# The process that probes


def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Probe], Spent]
) -> tuple[int, list[dict[str, Any]]]:
    """What a probe of `prepare` that does this ends with, and writes."""
    config = smoke(tmp_path)
    texts.ensure(config)
    monkeypatch.setattr(probing, "PROBES", {**PROBES, "prepare": prepare})
    monkeypatch.setattr(probing, "keep_freed_memory", lambda: None)
    folder = tmp_path / "probe"
    folder.mkdir()
    command.write_config(config, folder / CONFIG)
    code = 0
    try:
        probing.main(str(folder), ["prepare"])
    except SystemExit as ended:
        code = int(str(ended.code))
    lines = (folder / command.RESULTS).read_text(encoding="utf-8").splitlines()
    return code, [json.loads(line) for line in lines]


def test_a_probe_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, (begun, line) = ran(tmp_path, monkeypatch, lambda probe: Spent(2.0, 3.0))
    assert code == 0
    assert begun["free"] > 0 < begun["baseline"] <= line["peak"]
    assert (line["step"], line["wall"], line["processor"]) == ("prepare", 2.0, 3.0)


@pytest.mark.parametrize(
    ("error", "code", "written"),
    [
        (MemoryError(), 3, {"failed": "it ran out of memory"}),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, {}),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 3, {}),
        (
            ValueError("draft.shrink.layers: too many"),
            2,
            {"refused": "draft.shrink.layers: too many"},
        ),
    ],
)
def test_a_probe_says_why_it_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    written: dict[str, str],
) -> None:
    def fail(probe: Probe) -> Spent:
        raise error

    ended, (_, line) = ran(tmp_path, monkeypatch, fail)
    assert ended == code
    assert written.items() <= line.items()


def test_a_bug_in_a_probe_is_no_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(probe: Probe) -> Spent:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        ran(tmp_path, monkeypatch, fail)


def test_what_a_probe_refuses_is_one_line_and_a_bug_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.subprocess, "run", run_forked)
    config = smoke(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)^a probe failed:.*shared/texts"):
        probed(config, ["prepare"])  # before there are texts
    cut = smoke(tmp_path, "target=embedded", "draft.shrink.layers=[99]")
    texts.ensure(cut)
    with pytest.raises(ValueError, match="the target has"):
        probed(cut, ["prepare"])


# Numbers as people read them


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.1 s"), (59.4, "59.4 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(1e6, "< 0.1 GB"), (0.36e9, "0.4 GB"), (9.96e9, "10 GB"), (141e9, "141 GB")]
)
def test_sizes(count: float, text: str) -> None:
    assert gigabytes(count) == text


def test_every_part_of_a_bound_has_a_way_out(tmp_path: Path) -> None:
    config = smoke(tmp_path, "source=target", "draft.shrink.layers=[1]", "draft.shrink.steps=2")
    short, long = limits.ANY_LENGTH, TextLengths(9000, 1, 9000, 1, 1)
    cases = [limits.case_of(config, short), limits.case_of(smoke(tmp_path), long)]
    parts = {p for case in cases for bound in limits.DEMANDS.values() for p in bound(case).memory}
    assert parts == limits.REMEDIES.keys()


def test_the_peak_begins_anew() -> None:
    cpu = torch.device("cpu")
    with mmap.mmap(-1, 100 << 20) as held:  # an allocator might use what it has kept
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        high = memory.peak_bytes(cpu)
    memory.reset_peak(cpu)
    assert memory.peak_bytes(cpu) <= high - (90 << 20)
