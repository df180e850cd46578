"""`python -m pipelines.online`, the daemon as a process; and drift, which needs none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.data.rollouts import Record, read_parts
from draftkit.online.buffer import Entry
from draftkit.tracking import read_metrics
from pipelines.benchmarks import drift as drift_module
from pipelines.benchmarks import drift_parts
from pipelines.benchmarks.drift import EARLY, STAGE, early_enough, recovered
from pipelines.benchmarks.drift_report import drift_table
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.online import check_drafter
from pipelines.plan import GENERATE
from pipelines.refitting import daemon_folder
from pipelines.rollback import rollback
from pipelines.service import registry_of
from pipelines.stage import ensure
from tests.launching import Forked
from tests.online import making
from tests.services import buffer_of
from tests.trained import trained_target

Process = subprocess.Popen[str] | Forked
ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "draft=fresh",
    "hardware.threads=1",
    "hardware.dtype=float32",
    "draft.pretrain.num_hidden_layers=1",
    "draft.pretrain.hidden_size=32",
    "draft.pretrain.max_steps=10",
    "data.max_rows=120",
    "data.prompt_tokens=16",
    "data.max_length=48",
    "generate.rollouts=32",
    "generate.batch_size=32",
    "evaluate.prompts=12",
    "evaluate.validation_prompts=12",
    "evaluate.max_new_tokens=16",
    "optim.max_steps=12",
    "optim.compile=false",
    "optim.warmup_steps=0",
    "optim.per_device_train_batch_size=8",
    "online.min_records=24",
    "online.steps=4",
    "online.gate.records=24",
    "online.gate.anchors=8",
    "tracker=none",
]


def given_target() -> list[str]:
    return ["target=local", f"target.path={trained_target('data.max_rows=120')}"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("online")


def composed(root: Path, *overrides: str) -> Any:
    return compose_config([*overrides, f"root={root}", *SMALL, *given_target()])


@pytest.fixture(scope="module")
def drifted(root: Path) -> Iterator[Path]:
    """The experiment on a short stream, which stays short as long as this folder is looked at."""
    patch = pytest.MonkeyPatch()
    patch.setattr(drift_parts, "REQUESTS", 120)
    patch.setattr(drift_parts, "MAX_NEW_TOKENS", 12)
    patch.setattr(drift_module, "POINTS", 4)
    patch.setattr(drift_module, "ORACLE_STEPS", 12)
    yield ensure(STAGE, composed(root, "+experiment=drift"))
    patch.undo()


def test_the_summary_has_the_keys_that_others_read(drifted: Path) -> None:
    summary = read_json(drifted / "summary.json")
    for key in ("versions_published", "versions_rejected", "records_seen"):
        assert isinstance(summary[key], int)
    assert summary["records_seen"] == 240
    assert summary["anchor_alpha_change"]["prompts"] == 12
    assert summary["recovered_fraction"] is None or isinstance(summary["recovered_fraction"], float)
    assert len(summary["alpha_by_version"]) == summary["versions_published"]
    assert [(t["domain"], t["share"]) for t in summary["tests"]] == [
        ("prose", 0.25),
        ("prose", 1.0),
        ("cpp", 0.25),
        ("cpp", 1.0),
    ]
    assert EARLY <= 0.25  # the first point at or behind it


def test_the_curve_covers_the_stream_and_its_updates_are_dated(drifted: Path) -> None:
    curve = read_json(drifted / "curve.json")
    assert [point["first"] for point in curve["points"]] == list(range(0, 240, 30))
    assert {"static", "oracle", "online", "without_anchors"} == set(curve["points"][0]["alpha"])
    updates = [update for update in curve["updates"] if update["service"] == "online"]
    assert updates
    assert all(update["seconds"] > 0 for update in updates)
    for point in curve["points"]:  # scored before its requests are recorded
        taken = [u["version"] for u in updates if u["version"] and u["request"] <= point["first"]]
        assert point["versions"]["online"] == ["v000001", *taken][-1]
    assert (drifted / "drift.png").stat().st_size > 10_000


def test_the_table_fits_80_columns(drifted: Path) -> None:
    console = Console(width=80, record=True)
    console.print(drift_table(read_json(drifted / "summary.json")))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "prose 25%" in text
    assert "versions published" in text
    assert "…" not in text


def test_an_interrupted_run_goes_on_and_finds_the_same(drifted: Path, root: Path) -> None:
    """Texts and drafters stay, the stream is gone through again."""
    curve = read_json(drifted / "curve.json")
    made = (drifted / "static" / "model.safetensors").stat().st_mtime_ns
    (drifted / "summary.json").unlink()
    (drifted / "curve.json").unlink()
    ensure(STAGE, composed(root, "+experiment=drift"))
    assert (drifted / "static" / "model.safetensors").stat().st_mtime_ns == made
    again = read_json(drifted / "curve.json")
    assert again["points"] == curve["points"]
    timeless = [
        [{k: v for k, v in update.items() if k != "seconds"} for update in found["updates"]]
        for found in (curve, again)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("domains", ["[prose]", "[prose,cpp,prose]"])
def test_domains_that_cannot_follow_each_other_are_refused(root: Path, domains: str) -> None:
    with pytest.raises(ValueError, match=r"^data\.domains must name at least two, and none twice"):
        launch(STAGE, composed(root, "+experiment=drift", "name=other", f"data.domains={domains}"))


def test_recovery_is_the_share_of_the_way_that_was_come() -> None:
    names = {"static": 0.5, "oracle": 0.7, "online": 0.65}
    noise = [0.0, 0.05, -0.05, 0.02]
    scored = {name: making.totals([a + n for n in noise]) for name, a in names.items()}
    found = recovered(scored, "online")
    assert found is not None
    assert found.mean == pytest.approx(0.75)
    level = {name: making.totals([0.5 + n for n in noise]) for name in names}
    level["oracle"] = making.totals([0.5 - n for n in noise])
    assert recovered(level, "online") is None


def test_the_first_share_with_enough_is_of_unseen_requests() -> None:
    def point(first: int, online: float) -> dict[str, Any]:
        alphas = {"static": 0.5, "oracle": 0.7, "online": online}  # it has learned these
        return {
            "domain": "prose",
            "first": first,
            "last": first + 10,
            "alpha": {name: {"mean": mean} for name, mean in alphas.items()},
        }

    points = [point(40, 0.5), point(50, 0.56), point(60, 0.58)]
    assert early_enough(points, gap=0.1) == pytest.approx(20 / 30)
    assert early_enough(points[:2], gap=0.1) is None
    assert early_enough(points, gap=-0.1) is None


# The daemon

BARE = ["online.anchor_fraction=0", "online.gate.anchors=0"]  # no text to sample for it


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    return list(read_parts(ensure(GENERATE, composed(root, "+experiment=serve"))))


def fill(config: Any, records: list[Record]) -> None:
    """Six times the rollouts, under prompts that differ, as if they had been served."""
    served = [
        Entry(
            record=Record(
                **{**vars(record), "prompt_ids": [1 + turn, *record.prompt_ids[1:]], "document": ""}
            ),
            route="default",
        )
        for turn in range(6)
        for record in records
    ]
    buffer = buffer_of(config)
    buffer.append(served)
    buffer.close()


def words_of(root: Path, name: str, *overrides: str) -> list[str]:
    given = ["+experiment=serve", f"root={root}", f"name={name}", *SMALL, *given_target()]
    return [*given, *overrides]


def fork(root: Path, name: str, *overrides: str) -> Forked:
    return Forked("pipelines.online", *words_of(root, name, *overrides))


def start(root: Path, name: str, *overrides: str, stage: str = "online") -> subprocess.Popen[str]:
    """In an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"pipelines.{stage}", *words_of(root, name, *overrides)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(process: Process, said: Callable[[str], bool]) -> str:
    """What `process` prints up to the line for which `said`; fails when it ends before."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if said(line):
            return "".join(lines)
    pytest.fail("".join(lines))


def ended(process: Process) -> str:
    """What is left of what it prints, once it has ended."""
    with process:
        assert process.stdout is not None
        return process.stdout.read()


def test_a_daemon_refits_is_alone_and_can_be_told_to_stop(root: Path, records: list) -> None:
    name = "daemon"
    config = composed(root, "+experiment=serve", f"name={name}")
    fill(config, records)
    first = start(root, name, *BARE)
    try:
        until(first, lambda line: "update 0" in line)
        second = fork(root, name, *BARE)
        assert "another" in ended(second)
        assert second.returncode == 2
        first.send_signal(signal.SIGTERM)
        assert "told to stop" in ended(first)
        assert first.returncode == 0
    finally:
        first.kill()
    summary = read_json(daemon_folder(config) / "summary.json")
    assert summary["versions_published"] + summary["versions_rejected"] == 1
    assert summary["records_seen"] > 24
    lines = read_metrics(daemon_folder(config) / "metrics.jsonl")
    assert lines[0]["section"] == "online"


def test_a_killed_daemon_goes_on(root: Path, records: list) -> None:
    """`kill -9` in the middle of an update: the next start takes it up and finishes it."""
    name = "killed"
    config = composed(root, "+experiment=serve", f"name={name}")
    fill(config, records)
    first = fork(root, name, *BARE, "online.steps=2000")
    until(first, lambda line: "watching" in line)
    time.sleep(0.5)  # anywhere in the update
    first.kill()
    ended(first)
    assert [version.name for version in registry_of(config, "default").versions()] == ["v000001"]
    again = fork(root, name, *BARE, "online.steps=2", "online.most_updates=1")
    assert "all updates done" in ended(again)
    assert again.returncode == 0


def test_a_version_is_taken_back_by_command(root: Path, capsys: pytest.CaptureFixture) -> None:
    config = composed(root, "+experiment=serve", "name=back")
    registry = registry_of(config, "default")

    def write(folder: Path) -> None:
        from safetensors.torch import save_file
        from torch import zeros

        save_file({"weight": zeros(2)}, folder / "model.safetensors")

    registry.seed(write)
    registry.publish(write, metrics={})
    rollback(config)
    assert "v000001" in capsys.readouterr().out
    current = registry.current()
    assert current is not None
    assert current.name == "v000001"
    with pytest.raises(ValueError, match="v000001"):
        rollback(config)


@pytest.mark.parametrize("name", ["prompt_lookup", "none"])
def test_where_nothing_is_drafted_there_is_nothing_to_refit(name: str) -> None:
    config = compose_config(["+experiment=serve", f"decode.proposer={name}"])
    with pytest.raises(ValueError, match=f"decode.proposer={name} has no drafter to refit: use "):
        check_drafter(config)
    argmax = ["+experiment=serve", "decode.proposer=argmax"]
    check_drafter(compose_config(argmax))
    with pytest.raises(ValueError, match=r"decode\.proposer=argmax needs online\.teacher=target"):
        check_drafter(compose_config([*argmax, "online.teacher=stored"]))
    match = ["+experiment=serve", "decode.verification=match", "online.teacher=stored"]
    with pytest.raises(ValueError, match=r"decode.verification=match needs online\.teacher=target"):
        check_drafter(compose_config(match))
