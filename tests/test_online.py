"""`python -m pipelines.online`, the daemon as a process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from draftkit.artifacts import read_json
from draftkit.config import Config, DecodeConfig, OnlineConfig, SamplingConfig
from draftkit.data.rollouts import Record, read_parts
from draftkit.distillation.batch import Batch
from draftkit.distillation.trainer import Trainer
from draftkit.tracking import read_metrics
from pipelines.configuration import compose_config
from pipelines.online import check_drafter
from pipelines.plan import GENERATE
from pipelines.push import check_pushed
from pipelines.rollback import rollback
from pipelines.service import daemon_folder, registry_of, service_folder
from pipelines.stage import ensure
from tests.launching import Forked
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


def composed(root: Path, *overrides: str) -> Any:
    return compose_config([*overrides, f"root={root}", *SMALL, *given_target()])


# The daemon

BARE = ["online.anchor_fraction=0", "online.gate.anchors=0"]  # no text to sample for it


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    return list(read_parts(ensure(GENERATE, composed(root, "+experiment=serve"))))


def fill(config: Any, records: list[Record]) -> None:
    """Six times the rollouts, under prompts that differ, as if they had been served."""
    served = [
        (
            "default",
            replace(record, prompt_ids=[1 + turn, *record.prompt_ids[1:]], document=""),
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
    first = fork(root, name, *BARE)
    try:
        until(first, lambda line: "update 0" in line)
        second = fork(root, name, *BARE)
        assert "another" in ended(second)
        assert second.returncode == 2
        first.send_signal(signal.SIGTERM)
        page = service_folder(config) / "report.html"
        assert f"told to stop; as a page: {page}" in ended(first)
        assert first.returncode == 0
    finally:
        first.kill()
    summary = read_json(daemon_folder(config) / "summary.json")
    assert summary["versions_published"] + summary["versions_rejected"] == 1
    assert summary["records_seen"] > 24
    lines = read_metrics(daemon_folder(config) / "metrics.jsonl")
    assert lines[0]["section"] == "online"
    counts = (f"{summary[f'versions_{what}']} {what}" for what in ("published", "rejected"))
    verdict = ", ".join(counts).replace("rejected", "refused")
    assert f"{verdict}, 0 taken back" in page.read_text()


def test_a_killed_daemon_goes_on(
    root: Path, records: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9` in the middle of an update: the next start takes it up and finishes it."""
    name = "killed"
    config = composed(root, "+experiment=serve", f"name={name}")
    fill(config, records)
    step = Trainer.step

    def telling(trainer: Trainer, batch: Batch) -> Any:
        os.write(1, b"a step\n")
        return step(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", telling)
        first = fork(root, name, *BARE, "online.steps=2000")
    until(first, lambda line: "a step" in line)
    first.kill()
    ended(first)
    assert [version.name for version in registry_of(config, "default").versions()] == ["v000001"]
    again = fork(root, name, *BARE, "online.steps=2", "online.most_updates=1")
    assert "all updates done" in ended(again)
    assert again.returncode == 0


def test_what_is_in_force_goes_to_the_engine_and_what_serves_is_in_the_summary(
    root: Path, records: list
) -> None:
    name, out = "pushed", root / "pushed.txt"
    config = composed(root, "+experiment=serve", f"name={name}")
    fill(config, records)
    command = f'echo $DRAFTKIT_VERSION >> {out}; test -s "$DRAFTKIT_DRAFT/model.safetensors"'
    given = ["online.push=command", f"online.command='{command}'", "online.most_updates=1"]
    process = fork(root, name, *BARE, *given)
    said = ended(process)
    assert process.returncode == 0
    assert "online: default: the engine serves v000001" in said
    registry = registry_of(config, "default")
    assert out.read_text().split() == [version.name for version in registry.versions()]
    current = registry.current()
    assert current is not None
    summary = read_json(daemon_folder(config) / "summary.json")
    assert summary["version_served"] == {"default": current.name}
    (pushed,) = (config.root / Path(name) / "service/pushed/default").glob(current.name)
    assert "lm_head.weight" in load_file(pushed / "model.safetensors")  # though it is tied


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["online.push=vllm"], "online.push=vllm: name the engine by engine.url="),
        (["online.push=command"], "online.command"),
        (["online.push=vllm", "engine.url=u", "online.routes=[default,a]"], "online.routes"),
    ],
)
def test_a_push_without_an_engine_to_push_to_is_refused_in_one_line(
    root: Path, options: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(words)}[^\n]*$"):
        check_pushed(composed(root, "+experiment=serve", *options))


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


@pytest.mark.parametrize(
    ("decode", "teacher", "words"),
    [
        ({"proposer": "prompt_lookup"}, "target", "decode.proposer=prompt_lookup has no drafter"),
        ({"proposer": "none"}, "target", "decode.proposer=none has no drafter to refit: use "),
        ({"proposer": "argmax"}, "stored", "decode.proposer=argmax needs the target's weights"),
        (
            {"verification": "match"},
            "stored",
            "decode.verification=match needs the target",
        ),
    ],
)
def test_where_there_is_nothing_to_refit_or_to_judge_by_it_is_said(
    decode: dict[str, str], teacher: str, words: str
) -> None:
    given = Config(decode=DecodeConfig(**decode), online=OnlineConfig(teacher=teacher))
    with pytest.raises(ValueError, match=re.escape(words)):
        check_drafter(given)
    if teacher == "stored":
        check_drafter(replace(given, online=OnlineConfig()))


def test_a_loss_that_greedy_serving_leaves_without_a_gradient_is_refused_at_the_start() -> None:
    given = Config(sampling=SamplingConfig(temperature=0.0))
    with pytest.raises(
        ValueError, match=r"^divergence must be ce_argmax \(or set divergence\.temp"
    ):
        check_drafter(given)


def test_lossy_verification_is_refused_in_one_line() -> None:
    given = Config(decode=DecodeConfig(verification="typical"))
    with pytest.raises(ValueError, match=r"^decode\.verification=typical is lossy, and a drafter"):
        check_drafter(given)
