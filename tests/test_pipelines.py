"""The commands on tiny models: the chain, interruption by `kill -9`, repetition, bad input."""

import multiprocessing
import operator
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import draftkit.models.files
import pipelines.stage
from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.data.rollouts import read_parts
from draftkit.data.splits import read_splits
from draftkit.evaluation.engines import best_gamma_of
from draftkit.models.files import CARD
from pipelines.benchmarks import decoder
from pipelines.command import launch
from pipelines.contexts import read_contexts
from pipelines.plan import DISTILL, EVALUATE, EXPORT, GENERATE, PREPARE, SCORES, TRAIN
from pipelines.product import Stage, plan
from pipelines.stage import ensure
from tests.keys import missing_keys
from tests.smoke import numbers, paths_of, same_weights, smoke

pytestmark = pytest.mark.usefixtures("one_pass")


@pytest.fixture(scope="module")
def finished(root) -> Path:
    """A finished smoke experiment."""
    launch(DISTILL, smoke(root))
    return root / "smoke"


def kill_when(ready: Callable[[], bool], stage: Stage, config: Config) -> None:
    """Launch `stage` in a process of its own and kill it as soon as `ready()`."""

    def child() -> None:
        launch(stage, config)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while not ready():
        assert process.is_alive(), "the stage ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


# The chain


def test_one_command_runs_every_stage_and_answers_the_question(finished, root, capsys):
    summary = read_json(finished / "distill" / "summary.json")
    judged = read_json(finished / "evaluate" / "summary.json")
    for mode in ("alpha", "alpha_greedy_draft", "alpha_exact_match"):
        assert summary[f"{mode}_before"] == judged["before"][mode]
        assert summary[f"{mode}_after"] == judged[mode]
        assert summary[f"{mode}_gain"]["ci95"] is None  # of eight documents
    assert summary["alpha_gain"]["mean"] > 0
    lengths = (part["acceptance_length"]["mean"] for part in (judged, judged["before"]))
    assert judged["acceptance_length_gain"]["mean"] == pytest.approx(operator.sub(*lengths))
    inputs = read_json(finished / "distill" / "manifest.json")["inputs"]
    trained = read_json(finished / "train" / "manifest.json")
    for key in ("data", "target", "draft"):
        assert inputs[key] == trained["inputs"][key]
    assert inputs["train"] == trained["product"]
    assert summary["steps"] == smoke(root).optim.max_steps
    assert summary["peak_memory_bytes"] > 1e7
    assert not list((finished / "train").glob("*.safetensors"))  # what a resumed run would need
    launch(DISTILL, smoke(root))
    shown = capsys.readouterr().out
    assert "nothing to do" in shown
    assert f"{finished / 'distill' / 'report.html'}\n" in shown
    for stage in ("distill", "evaluate"):
        for name in ("report.html", "report.md"):
            assert judged["reason"][1:] in (finished / stage / name).read_text()
    assert "How it was trained" in (finished / "distill" / "report.md").read_text()
    assert "tokens a target pass" in shown
    assert (finished / "evaluate" / "samples.txt").read_text() in shown
    launch(EVALUATE, smoke(root))
    assert "tau, tokens a target pass" in capsys.readouterr().out


def test_an_export_launches_the_judged_drafter_and_says_what_to_expect(finished, root, capsys):
    judged = read_json(finished / "evaluate" / "summary.json")
    summary = launch(EXPORT, smoke(root))
    assert missing_keys("export", summary) == []
    assert summary["gamma"] == max(1, judged["best_gamma"])
    argmax = max(1, judged["best_gamma_by_mode"]["alpha_greedy_draft"])
    assert summary["engines"]["sglang"]["gamma"] == argmax
    rows = {(row["engine"], row["setting"]): row for row in judged["engines"]}
    row, expected = rows["SGLang", "argmax"], summary["engines"]["sglang"]["expected"]
    assert expected["acceptance"] == row["acceptance"]
    assert expected["gamma"] == argmax
    assert expected["temperature"] == 1
    folder = finished / "export"
    assert same_weights(first=folder / "hf", second=finished / "train" / "draft")
    assert "Drafter of the experiment smoke" in (folder / "hf" / CARD).read_text()
    tokens = expected["acceptance_length"]["mean"]
    assert f"sglang    {tokens:.2f} tokens a pass at gamma" in capsys.readouterr().out


def test_every_way_is_timed_at_its_own_number_and_every_chunk_of_it_is_kept(finished, root, capsys):
    judged = read_json(finished / "evaluate" / "summary.json")
    kept = read_json(finished / "evaluate" / "timing.json")["1"]
    assert set(judged["ways"]) == {"drafter", "hybrid", "prompt_lookup", "before"}
    for name, way in judged["ways"].items():
        chunks = kept["after" if name == "drafter" else name]
        assert 1 <= way["gamma"] == chunks["gamma"] <= 12
        seconds = sum(chunks["seconds"]) + sum(chunks["prefill_seconds"])
        assert len(chunks["seconds"]) == way["speedup"]["end_to_end"]["chunks"] == 6
        rate = way["tokens_per_second_end_to_end"]
        assert rate == pytest.approx(sum(chunks["tokens"]) / seconds)
        speedup = rate / way["plain_tokens_per_second_end_to_end"]
        assert way["speedup"]["end_to_end"]["mean"] == pytest.approx(speedup)
    assert judged["ways"]["drafter"]["gamma"] == judged["gamma"]
    hybrid = judged["ways"]["hybrid"]
    assert 1 <= hybrid["draft_gamma"] <= hybrid["gamma"]
    assert {kept["hybrid"][key] == hybrid[key] for key in ("draft_gamma", "lookup_min")} == {True}
    numbers = [str(number) for number in range(1, 13)]
    for key in ("acceptance_length_by_k", "speedup_by_k"):
        assert [*judged[key]] == [*judged["before"][key]] == numbers
    assert judged["best_gamma_factor"] == max(1.0, *judged["speedup_by_k"].values())
    launch(DISTILL, smoke(root))
    shown = capsys.readouterr().out
    for name in ("drafter", "drafter + prompt lookup", "prompt lookup", "plain", "drafter before"):
        assert re.search(rf"│ {re.escape(name)} +│", shown)


@pytest.mark.usefixtures("finished")
def test_proposals_that_are_counted_are_judged_by_the_training_texts(root):
    options = ["name=ngram", "evaluate.draft=given"]
    summary = launch(EVALUATE, smoke(root, "decode.proposer=ngram", *options))
    assert summary["proposer"] == "ngram"
    assert summary["lossless"]["passed"] is True
    assert summary["acceptance_rate"]["n"] >= summary["alpha_decoding"]["n"] > 0
    assert set(summary["ways"]) == {"prompt_lookup", "ngram"}


def test_answers_know_the_documents_of_their_prompts(finished, root):
    texts = read_splits(next((root / "shared" / "texts").iterdir()))
    contexts = next((root / "shared" / "contexts").iterdir())
    rollouts = next((root / "shared" / "generate").iterdir())
    for records, examples in (
        (read_contexts(contexts, "test"), texts.test),
        (read_contexts(contexts, "validation"), texts.validation),
        (read_parts(rollouts), texts.train),
    ):
        for record, example in zip(records, examples, strict=False):
            assert record.prompt_ids == example.prompt_ids
            assert record.document == example.document != ""
    judged = read_json(finished / "evaluate" / "summary.json")
    scored = read_json(finished / "evaluate" / "prompts.json")["1"]["after"]
    assert judged["alpha"]["documents"] == len(set(scored["documents"])) == 8


def test_evaluation_prompts_are_held_out_of_training(finished, root):
    config = smoke(root)
    contexts = next((root / "shared" / "contexts").iterdir())
    rollouts = next((root / "shared" / "generate").iterdir())
    seen = {tuple(record.prompt_ids) for record in read_parts(rollouts)}
    for split in ("validation", "test"):
        held_out = {tuple(record.prompt_ids) for record in read_contexts(contexts, split)}
        assert held_out
        assert not held_out & seen
    assert len(read_parts(rollouts)) == config.generate.rollouts


def test_each_use_of_the_target_has_noise_of_its_own(finished, root):
    """Rows are counted from 0 in all three: the same prompt would get the same answer."""
    contexts = next((root / "shared" / "contexts").iterdir())
    rollouts = read_parts(next((root / "shared" / "generate").iterdir()))
    parts = [rollouts, *(read_contexts(contexts, split) for split in ("validation", "test"))]
    assert len({record.seed for part in parts for record in part}) == len(parts)


def test_the_trained_drafter_is_a_plain_model_folder_with_the_targets_tokenizer(finished, root):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished / "distill" / "draft"
    target_path, draft_path = paths_of(smoke(root))
    AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(target_path).get_vocab()
    assert not same_weights(first=folder, second=draft_path)


def test_the_drafter_laid_out_is_a_copy(finished):
    """Who edits it leaves alone what was trained, which evaluation and export read."""
    laid_out, trained = (finished / stage / "draft" for stage in ("distill", "train"))
    assert same_weights(first=laid_out, second=trained)
    for file in trained.iterdir():
        assert not file.samefile(laid_out / file.name)


def test_transformers_proposes_as_many_tokens_as_pay_by_what_the_folder_says(finished):
    from transformers import AutoModelForCausalLM

    judged = read_json(finished / "evaluate" / "summary.json")
    loaded = AutoModelForCausalLM.from_pretrained(finished / "distill" / "draft").generation_config
    assert loaded.num_assistant_tokens == max(best_gamma_of(judged, "hf"), 1)
    assert loaded.num_assistant_tokens_schedule == "constant"
    assert loaded.assistant_confidence_threshold == 0
    trained = read_json(finished / "train" / "draft" / "generation_config.json")
    assert "num_assistant_tokens" not in trained


@pytest.mark.parametrize("source", ["fixed", "target"])
def test_stored_scores_teach_without_the_target_in_memory(tmp_path, source, monkeypatch):
    config = smoke(tmp_path, f"source={source}", "generate.top_k=40")
    scored = read_json(ensure(SCORES, config) / "summary.json")
    assert missing_keys("scores", scored) == []
    carried = [r.topk_ids for path in tmp_path.glob("shared/generate/*") for r in read_parts(path)]
    assert carried == [r.topk_ids for r in read_parts(plan(SCORES, config).folder)][: len(carried)]
    assert bool(carried) == (source == "target")

    def absent(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("draftkit.distillation.assembly.load_target", absent)
    folder = ensure(TRAIN, config)
    lines = [line for line in numbers(folder) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert 0 < read_json(folder / "summary.json")["alpha_error_bound"] < 1


def test_scores_of_texts_that_change_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"^generate\.top_k: source=draft .*generate\.top_k=0$"):
        ensure(TRAIN, smoke(tmp_path, "source=draft", "generate.top_k=8"))
    assert not [*tmp_path.glob("*/*/")]


def test_a_drafter_of_other_settings_is_not_judged(finished, root):
    options = ["name=unfinished", "source=fixed", "optim.max_steps=2"]
    ensure(TRAIN, smoke(root, *options))
    with pytest.raises(ValueError, match=r"divergence\.name was 'forward_kl', now 'jsd'"):
        launch(EVALUATE, smoke(root, *options, "divergence=jsd"))
    assert not (root / "unfinished" / "evaluate").exists()


def test_a_plan_says_what_would_be_done_and_does_nothing(finished, root, tmp_path, capsys):
    assert launch(DISTILL, smoke(tmp_path, "plan=true")) == {}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["distill:", "7", "steps,", "training", "in", "1", "process"]
    steps = ["texts", "prepare", "generate", "contexts", "train", "evaluate", "distill"]
    assert [line[0] for line in lines[1:-1]] == steps
    assert {tuple(line[1:3]) for line in lines[1:-1]} == {("to", "do")}
    assert lines[-1][:3] == ["on", "a", "card:"]
    assert not list(tmp_path.rglob("manifest.json"))
    launch(DISTILL, smoke(root, "plan=true"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[1] for line in lines[1:]} == {"complete"}


def test_each_product_is_hashed_once(finished, root, tmp_path, monkeypatch):
    """Also a given target, which four stages read; a second command remembers its checksum."""
    target_path, _ = paths_of(smoke(root))
    hashed = []
    for module in (draftkit.models.files, pipelines.stage):
        original = module.sha256_tree

        def count(folder, *, skip=None, original=original):
            hashed.append(Path(folder))
            return original(folder, skip=skip)

        monkeypatch.setattr(module, "sha256_tree", count)
    config = smoke(tmp_path, f"target.path={target_path}", "optim.max_steps=2")
    launch(TRAIN, config)
    assert len(hashed) == len(set(hashed))
    assert hashed.count(target_path) == 1
    hashed.clear()
    launch(TRAIN, config)
    assert hashed == []


@pytest.mark.parametrize("stage", [DISTILL, EVALUATE], ids=["distill", "evaluate"])
def test_without_proposals_there_is_nothing_to_judge_and_nothing_is_made(tmp_path, stage):
    for setting, way_out in (("decode.gamma=0", "1 or more"), ("decode.proposer=none", "another")):
        with pytest.raises(ValueError, match=rf"^{setting} proposes nothing.*use {way_out}"):
            launch(stage, smoke(tmp_path, setting))
    assert not list(tmp_path.rglob("manifest.json"))


def test_several_temperatures_are_evaluated_in_one_go_at_a_given_number_of_proposals(
    finished, root
):
    given = ["evaluate.draft=given", f"draft.path={finished / 'distill' / 'draft'}"]
    given += ["evaluate.temperatures=[0,0.7]", "decode.gamma=3"]
    summary = launch(EVALUATE, smoke(root, "name=temperatures", *given))
    assert list(summary["by_temperature"]) == ["0", "0.7"]
    inputs = read_json(root / "temperatures" / "evaluate" / "manifest.json")["inputs"]
    assert sum(name.startswith("contexts") for name in inputs) == 2  # none at 1, which is served
    assert summary["temperature"] == 0
    assert "before" not in summary
    greedy = summary["by_temperature"]["0"]
    assert greedy["alpha"]["mean"] == greedy["alpha_exact_match"]["mean"]
    assert greedy["alpha"]["mean"] != summary["by_temperature"]["0.7"]["alpha"]["mean"]
    assert {way["gamma"] for way in summary["ways"].values()} == {summary["gamma"]} == {3}


# The benchmark


@pytest.mark.usefixtures("finished")
def test_the_benchmark_measures_the_trained_pair_beside_hugging_face(root, capsys, monkeypatch):
    cases = decoder.CASES["cpu"]
    monkeypatch.setitem(decoder.CASES, "cpu", {1: cases[1], 2: cases[4]})
    for name, value in {"CHUNKS": 4, "MIN_CHUNKS": 2, "MAX_NEW_TOKENS": 8}.items():
        monkeypatch.setattr(decoder, name, value)
    summary = launch(decoder.STAGE, smoke(root))
    assert summary == read_json(root / "smoke" / "benchmark" / "summary.json")
    assert missing_keys("benchmark", summary) == []
    assert set(summary["acceptance_length"]) == {"mean", "ci95", "n", "prompts", "documents"}
    plain, drafted, *_ = summary["points"]
    for name in ("plain", "hf_plain", "hf_assisted"):
        assert summary[f"ratio_to_{name}"] == drafted["ratios"][name]["mean"]
    assert summary["plain_ratio_to_hf_plain"] == plain["ratios"]["hf_plain"]["mean"]
    assert summary["prediction_error"] == drafted["prediction_error"]
    assert summary["compile_seconds"] == 0
    assert summary["peak_memory_bytes"] > 1e7
    measured = [(p["temperature"], p["batch_size"], p["method"]) for p in summary["points"]]
    alone = ["plain", "speculative", "hf_plain", "hf_static", "hf_assisted", "hf_lookup"]
    for temperature in (0, 1):
        for batch, methods in ((1, alone), (2, alone[:3])):
            timed = [name for t, b, name in measured if (t, b) == (temperature, batch)]
            assert timed == methods
    for point in summary["points"]:
        assert point["prompts"] == point["chunks"] * point["batch_size"] > 1
        assert point.get("beside_hf", {"passed": True})["passed"]
    shown = capsys.readouterr().out
    assert "greedy, batch 1, eager" in shown
    assert max(map(len, shown.splitlines())) <= 80
    manifest = read_json(root / "smoke" / "benchmark" / "manifest.json")
    assert manifest["inputs"]["train"] != manifest["inputs"]["draft"]
    monkeypatch.setitem(decoder.CASES, "cpu", {100: decoder.BOTH})
    with pytest.raises(ValueError, match=r"^evaluate\.prompts: 100 rows need 200 held-out"):
        launch(decoder.STAGE, smoke(root, "name=crowd", "evaluate.draft=given"))


# The same run again, interrupted or not


def run_distill(root: Path, name: str) -> Config:
    options = ["optim.max_steps=12", "optim.save_steps=3", "optim.logging_steps=1"]
    return smoke(root, f"name={name}", "source=draft", "optim.eval_steps=6", *options)


@pytest.mark.usefixtures("finished")
def test_a_killed_distillation_ends_like_an_uninterrupted_one(root):
    ensure(TRAIN, run_distill(root, "whole"))
    checkpoint = root / "killed" / "train" / "checkpoint.safetensors"
    kill_when(checkpoint.exists, TRAIN, run_distill(root, "killed"))
    assert not (root / "killed" / "train" / "summary.json").exists()
    ensure(TRAIN, run_distill(root, "killed"))
    whole, run = root / "whole" / "train", root / "killed" / "train"
    lines = [line for line in numbers(whole) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert numbers(run) == numbers(whole)
    assert same_weights(first=run / "draft", second=whole / "draft")
    first, second = (read_json(path / "summary.json") for path in (whole, run))
    assert first["tokens"] == second["tokens"]


def test_a_killed_preparation_ends_like_an_uninterrupted_one(finished, root, tmp_path):
    config = smoke(tmp_path, "optim.save_steps=5")
    kill_when(lambda: any(tmp_path.rglob("draft-training/checkpoint.safetensors")), PREPARE, config)
    launch(PREPARE, config)
    made, whole = paths_of(config)[1], paths_of(smoke(root))[1]
    assert same_weights(first=made, second=whole)
    assert numbers(made.parent) == numbers(whole.parent)


def test_killed_rollouts_go_on_with_the_next_part(finished, root, tmp_path):
    paths = paths_of(smoke(root))
    models = [f"target.path={paths[0]}", f"draft.path={paths[1]}"]
    config = smoke(tmp_path, *models, "generate.batch_size=4")
    first = plan(GENERATE, config).folder / "part-00000000.parquet"
    kill_when(first.exists, GENERATE, config)
    before = first.stat().st_mtime_ns
    launch(GENERATE, config)
    assert first.stat().st_mtime_ns == before
    # In parts as large: in half precision a row may differ by rounding with those beside it.
    whole = smoke(tmp_path / "whole", *models, "generate.batch_size=4")
    found = [read_parts(ensure(GENERATE, one)) for one in (config, whole)]
    assert [r.output_ids for r in found[0]] == [r.output_ids for r in found[1]]
