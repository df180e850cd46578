"""`check`, the dry run of a plan with memory and time, and the refusal of what cannot fit."""

import mmap
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import pipelines.prepare
from draftkit.artifacts import locked
from draftkit.config import Config, DraftConfig, TargetConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.progress import duration
from draftkit.models import memory
from pipelines import dry, weights
from pipelines.check import check, goal_of, target_findings, template_findings
from pipelines.command import launch, run_command
from pipelines.configuration import compose_config
from pipelines.plan import DISTILL, EXPORT, GENERATE, TEXTS
from pipelines.product import SUMMARY, Product, ordered, plan
from pipelines.stage import ensure
from pipelines.weights import gigabytes
from tests.templates import CHAT, byte_bpe
from tests.test_prepare import smoke

pytestmark = pytest.mark.usefixtures("short_bursts", "forked")

SCORED = ["source=target", "generate.rollouts=8", "generate.top_k=8", "draft.lora.rank=2"]
SCORED += ["evaluate.temperatures=[1.0,0.0]"]


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Start the processes of a dry run as forks, which have imported all that this one has."""
    patch = pytest.MonkeyPatch()
    patch.setattr(dry, "METHOD", "fork")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which texts are read and nothing else is made."""
    folder = tmp_path_factory.mktemp("outputs")
    ensure(TEXTS, smoke(folder))
    return folder


def made(config: Config) -> set[str]:
    """The steps of `config` that are complete."""
    steps = ordered([goal_of(config)])
    return {step.name for step in steps if (step.folder / SUMMARY).is_file()}


def left(config: Config) -> list[str]:
    """What a dry run has left."""
    return [child.name for child in (Path(config.root) / dry.FOLDER).iterdir()]


def check_shown(shown: str, goal: Product) -> None:
    """Every step stands in the table, with memory and time where it was to do."""
    assert re.search(r"\nfits: \S+ GB of \d+ GB, about .* s\n", shown)
    for step in ordered([goal]):
        folder = str(step.folder.relative_to(step.config.root))
        line = next(line for line in shown.splitlines() if line.endswith(f"  {folder}"))
        state = "complete" if step.name == "texts" else "to do"
        assert re.match(rf"  {step.name} +{state} ", line)
        assert ("GB" in line) == (" s  " in line) == (step.name != "texts")
        assert len(line) <= 80


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.soak), SCORED, ["generate.top_k=8"]]
)
def test_every_stage_runs_below_a_folder_of_its_own_and_nothing_stays(
    root: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    source = [] if "source=target" in options or not options else ["source=fixed"]
    config = smoke(root, *options, *source)
    check(config)
    assert made(config) == {"texts"}
    assert left(config) == [".lock"]
    check_shown(capsys.readouterr().out, goal_of(config))


def test_a_command_with_a_limit_says_what_it_takes_of_what_is_yet_to_do(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = smoke(root, f"root={tmp_path}", "limit=2")
    assert launch(GENERATE, config) == {}
    check_shown(capsys.readouterr().out, plan(GENERATE, config))
    ensure(GENERATE, config)
    assert launch(EXPORT, config) == {}
    shown = capsys.readouterr().out
    assert "export: dry run of export (" in shown
    assert "dry run of generate" not in shown
    assert made(config) == {"texts", "generate"}


def test_other_commands_have_no_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # which the command sets for its own process
    monkeypatch.setattr("sys.argv", ["serve", "+experiment=smoke", "limit=3"])
    with pytest.raises(SystemExit, match="2"):
        run_command("serve", lambda config, job: pytest.fail("it ran"))
    assert capsys.readouterr().err.startswith("serve: limit: there is a dry run of distill, ")
    with pytest.raises(ValueError, match=r"^limit must be positive, got 0"):
        compose_config(["limit=0"])


def test_a_launch_of_several_processes_and_a_second_dry_run_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smoke(root)
    with (
        locked(Path(config.root) / dry.FOLDER),
        pytest.raises(ValueError, match=r"\.dry is in use by another run: wait"),
    ):
        check(config)
    monkeypatch.setattr(dry, "processes", lambda: 2)
    with pytest.raises(ValueError, match=r"^limit: a dry run is one process"):
        check(config)


def killed(config: Config, folder: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def raising(error: Exception) -> Callable[..., dict[str, Any]]:
    def run(config: Config, folder: Any) -> dict[str, Any]:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (killed, r"^prepare does not fit: the system ended its process with .* free: use a sm"),
        (raising(MemoryError()), r"^prepare does not fit: it ran out of memory with .* free: "),
        (raising(RuntimeError("DefaultCPUAllocator: can't allocate memory")), "out of memory"),
        (raising(RuntimeError("CUDA out of memory. Tried to allocate")), "ran out of memory"),
        (raising(ValueError("draft.shrink.layers: many")), r"^draft\.shrink\.layers: many$"),
        (raising(RuntimeError("shapes differ")), "^shapes differ$"),  # a bug is no lack of memory
    ],
)
def test_a_stage_that_cannot_run_ends_the_dry_run_in_one_line(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., dict[str, Any]],
    line: str,
) -> None:
    monkeypatch.setattr(pipelines.prepare, "prepare", run)
    config, bug = smoke(root), "differ" in line
    with pytest.raises(RuntimeError if bug else ValueError, match=line):
        check(config)
    assert left(config) == [".lock"]
    assert made(config) == {"texts"}


def test_answers_become_as_long_as_they_get() -> None:
    record = Record(
        prompt_ids=[1],
        output_ids=[2, 3],
        sampler="target",
        sampler_version="",
        sampling={},
        seed=0,
        row=0,
        tail_mass=[0.1, 0.2],
    )
    long = dry.lengthened(record, [7, 8, 9], 5)
    assert long.prompt_ids == [7, 8, 9]
    assert long.output_ids == [2, 3, 2, 3, 2]
    assert long.tail_mass == [0.1, 0.2, 0.1, 0.2, 0.1]
    assert long.topk_ids is None


def test_what_is_judged_as_it_is_trains_nothing() -> None:
    given = compose_config(["+experiment=smoke", "evaluate.draft=given"])
    assert goal_of(given).name == "evaluate"
    assert goal_of(compose_config(["+experiment=smoke"])).name == "distill"


def test_commands_refuse_what_cannot_fit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smoke(root, f"root={tmp_path}")
    monkeypatch.setattr(weights, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"^\w+ takes .* alone, and .* are free: "):
        ensure(DISTILL, config)
    assert made(config) == set()
    ensure(TEXTS, config)  # which needs no model


EIGHT = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
GIVEN = ["data.path=rows.jsonl", "sampling.from=config"]
ONE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}


def shaped(folder: Path, **shape: int) -> Path:
    """A model's folder that holds its shape alone."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
    LlamaConfig(**heads, **shape, dtype="bfloat16").save_pretrained(folder)
    return folder


def test_a_target_of_8b_and_a_drafter_of_1b_fit_a_card_of_80_gb(tmp_path: Path) -> None:
    target, draft = shaped(tmp_path / "8b", **EIGHT), shaped(tmp_path / "1b", **ONE)
    pair = [f"target.path={target}", f"draft.path={draft}"]
    config = compose_config(["+experiment=pair", *GIVEN, *pair])
    target = weights.stage_bytes(config, here=False)["contexts"]
    assert target == pytest.approx(16.06e9, rel=0.01)

    def needed(*options: str) -> float:
        given = compose_config(["+experiment=pair", *GIVEN, *pair, *options])
        return weights.stage_bytes(given, here=False)["train"]

    learning = needed("generate.top_k=8")
    assert learning == pytest.approx(16 * 1.50e9, rel=0.01)
    assert needed() == target + learning < 80e9
    assert needed("draft.lora.rank=8") == target + learning / 4


def test_a_plan_tells_what_weights_take_on_a_card(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(DISTILL, smoke(root, "plan=true"))
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"on a card: < 0\.1 GB of weights \(bfloat16\), gradients and moments \(", line)


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


def test_the_peak_begins_anew() -> None:
    cpu = torch.device("cpu")
    with mmap.mmap(-1, 100 << 20) as held:  # an allocator might use what it has kept
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        high = memory.peak_bytes(cpu)
    memory.reset_peak(cpu)
    assert memory.peak_bytes(cpu) <= high - (90 << 20)


def test_a_head_of_another_target_is_a_note(tmp_path: Path) -> None:
    for name, more in (("target", {}), ("head", {"architectures": ["LlamaForCausalLMEagle3"]})):
        LlamaConfig(**more).save_pretrained(tmp_path / name)
    sides = {"target": TargetConfig(path=str(tmp_path / "target")), "root": str(tmp_path)}
    config = replace(Config(), **sides, draft=DraftConfig(path=str(tmp_path / "head")))
    (found,) = target_findings(config)
    assert found.level == "note"
    assert found.text.startswith(f"draft.path {tmp_path / 'head'}: the head names no target that")
    assert [*target_findings(replace(config, draft=DraftConfig()))] == []


@pytest.mark.parametrize(
    ("template", "mark"),
    [
        ("{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}", "[/INST][INST]"),
        (CHAT, None),
        (None, None),
    ],
)
def test_a_template_whose_turns_begin_with_text_is_named(
    tmp_path: Path, template: str | None, mark: str | None
) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    byte_bpe(template=template).save_pretrained(tmp_path)
    config = replace(Config(), target=TargetConfig(path=str(tmp_path)))
    found = [f"{one.level}: {one.text}" for one in template_findings(config)]
    text = f"note: turns begin with text that is no token, {mark!r}: a message can hold it as well"
    assert found == ([] if mark is None else [text])
