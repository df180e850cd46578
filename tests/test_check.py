"""`check`, the dry run of a plan with memory and time, and the refusal of what cannot fit."""

import mmap
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import pipelines.prepare
from draftkit.artifacts import locked, read_json, write_json
from draftkit.config import Config, DraftConfig, TargetConfig
from draftkit.data.rollouts import Record, write_records
from draftkit.data.splits import read_splits
from draftkit.distillation.progress import duration
from draftkit.models import devices
from draftkit.tracking import FILE_NAME
from pipelines import dry, weights
from pipelines.check import check, goal_of, target_findings, template_findings
from pipelines.command import launch, run_command
from pipelines.configuration import compose_config
from pipelines.plan import DISTILL, EVALUATE, EXPORT, GENERATE, SCORES, TEXTS, TRAIN
from pipelines.product import SUMMARY, Product, complete_summary, ordered, plan
from pipelines.stage import ensure, make
from pipelines.weights import gigabytes
from tests.templates import CHAT, byte_bpe
from tests.test_prepare import smoke

pytestmark = pytest.mark.usefixtures("one_pass")

ANSWER = Record(
    prompt_ids=[1], output_ids=[2, 3], sampler="", sampler_version="", sampling={}, seed=0, row=0
)
SCORED = ["source=target", "generate.rollouts=8", "generate.top_k=8", "draft.lora.rank=2"]
SCORED += ["evaluate.temperatures=[1.0,0.0]"]


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
    """Every step that is to do stands there with memory and time, and from how much these are."""
    assert re.search(r"\nfits: \S+ GB of \d+ GB, about .* s\n  projected from \d batches", shown)
    for step in ordered([goal]):
        told = re.search(rf"dry run of {step.name}\n  (.*)\n", shown)
        assert (told is None) == (step.name == "texts")
        taken = r"\S+( \S+)? GB, [\d.]+ s"
        if told and step.name in ("distill", "export"):
            assert re.fullmatch(taken, told[1])
        elif told:
            assert re.fullmatch(rf"{taken} for \d+ of \d+ .*: [\d.]+ s for all", told[1])


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.soak), SCORED, ["generate.top_k=8"]]
)
def test_every_stage_runs_on_few_batches_and_nothing_stays(
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
    assert "export: dry run of export\n" in shown
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


def raising(error: Exception) -> Callable[..., dict[str, Any]]:
    def run(config: Config, folder: Any) -> dict[str, Any]:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (raising(MemoryError()), r"^prepare does not fit: it ran out of memory with .* free: use"),
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


def shortened(step: Product, **sections: Any) -> tuple[Product, Product]:
    """`step` under other sections, and the same of three batches."""
    whole = replace(step, config=replace(step.config, **sections))
    return whole, dry.shortened(whole, 3, Path(step.config.root) / "few", {})


def test_what_was_made_of_few_batches_is_never_taken_for_the_whole(
    root: Path, tmp_path: Path
) -> None:
    config = smoke(root, f"root={tmp_path}", "generate.rollouts=64", "generate.batch_size=4")
    ensure(TEXTS, config)
    whole = plan(GENERATE, config)
    few = dry.shortened(whole, 3, tmp_path / "few", {})
    make(few)
    assert read_json(few.folder / SUMMARY)["rollouts"] == 16
    seconds, told = dry.projected(whole, few, 1.0)
    assert (seconds > 1, told) == (True, "16 of 64 texts")
    assert few.address != whole.address
    shutil.copytree(few.folder, whole.folder)
    with pytest.raises(ValueError, match=r"other settings \(limit was 3, now None\)"):
        complete_summary(whole)
    limited = replace(config, limit=3)
    assert plan(SCORES, limited).address != plan(SCORES, config).address


def test_nothing_is_uploaded_and_a_step_is_a_whole_period_of_what_is_sampled(root: Path) -> None:
    config = smoke(root, "export.push_to_hub=a/b", "source.refresh_steps=4", "optim.max_steps=40")
    few = dry.shortened(plan(TRAIN, config), 3, root / "few", {}).config
    assert few.export.push_to_hub is None
    assert few.tracker == "none"
    assert few.optim.max_steps == 1 + 3 * 4


def test_steps_are_projected_at_the_pace_behind_the_first(tmp_path: Path) -> None:
    """Of 40 steps 4 ran, of half a second each; of 4 validations one at the end, of 2 seconds."""
    config = smoke(tmp_path, "optim.max_steps=40", "optim.eval_steps=10")
    step, few = shortened(plan(TRAIN, config), root=str(tmp_path))
    few.folder.mkdir(parents=True)
    lines = [("validation", 0, 1.0), *(("train", n, 20 + n / 2) for n in range(1, 5))]
    lines.append(("validation", 4, 24.0))
    text = "".join(f'{{"section": "{s}", "step": {n}, "time": {at}}}\n' for s, n, at in lines)
    (few.folder / FILE_NAME).write_text(text)
    assert dry.projected(step, few, 30.0) == (30 + 36 * 0.5 + 3 * 2, "4 of 40 steps")


def test_answers_are_projected_at_the_pace_behind_the_first_part(tmp_path: Path) -> None:
    config = smoke(tmp_path, "generate.rollouts=64", "generate.batch_size=4")
    step, few = shortened(plan(GENERATE, config))
    few.folder.mkdir(parents=True)
    for part in range(4):
        path = few.folder / f"part-{part}.parquet"
        write_records(path, [ANSWER] * 4)
        os.utime(path, (0, 100 + 3 * part))
    assert dry.projected(step, few, 60.0) == (60 + 48 * 3 / 4, "16 of 64 texts")


def test_judging_is_projected_by_its_prompts_and_those_that_are_timed(root: Path) -> None:
    options = ["evaluate.batch_size=1", "evaluate.timing_prompts=192", "evaluate.prompts=8"]
    step, few = shortened(plan(EVALUATE, smoke(root, *options)))
    few.folder.mkdir(parents=True)
    way = {"seconds": [1.0, 2.0, 3.0], "prefill_seconds": [0.5, 0.5, 1.0]}
    write_json(few.folder / "timing.json", {"1": {"plain": way, "after": way}})
    counts = read_splits(step.inputs["texts"].path).counts
    prompts = min(8, counts["test"])
    assert prompts > 3
    seconds = 30 * prompts / 3 + 16 * (prompts / 3 - 1)
    told = f"3 of {prompts} prompts, 3 of {prompts} timed batches"
    assert dry.projected(step, few, 30.0) == (pytest.approx(seconds), told)


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
        high = devices.peak_bytes(cpu)
    devices.reset_peak(cpu)
    assert devices.peak_bytes(cpu) <= high - (90 << 20)


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
