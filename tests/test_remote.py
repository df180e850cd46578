"""`target.urls` as the commands see it: the whole of `distill`, and the daemon, without weights."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftkit.artifacts import read_json
from draftkit.config import Config, TargetConfig
from draftkit.distillation.losses import RemoteTeacher
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import estimates, score_contexts
from draftkit.models.files import ModelFolder
from draftkit.models.loading import load_draft, load_target, with_path
from draftkit.models.shapes import context_of
from pipelines.contexts import read_contexts
from pipelines.distill import show
from pipelines.evaluate import check as check_evaluate
from pipelines.plan import CONTEXTS, DISTILL, EVALUATE, TRAIN, lengths_of
from pipelines.product import SUMMARY, plan
from pipelines.stage import ensure
from pipelines.train import check
from tests.distillation.serving import Engine, remote, served
from tests.online import making
from tests.online.shop import Shop, load
from tests.smoke import models, smoke
from tests.trained import trained_target

FLOAT = "hardware.dtype=float32"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """What serves the target of the smallest experiment."""
    folder = trained_target(FLOAT)
    target = load_target(replace(Config().target, path=str(folder)), smoke(folder, FLOAT).hardware)
    ends, tokenizer = target.eos_token_ids, target.tokenizer
    with served(Engine(target.adapter, ends, tokenizer.decode, tokenizer.encode)) as running:
        yield running


@pytest.fixture
def weightless(tmp_path: Path) -> str:
    """Its folder, as who asks the engine has it."""
    folder = tmp_path / "target"
    shutil.copytree(trained_target(FLOAT), folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


def asking(root: Path, folder: str, engine: Engine, *words: str) -> Config:
    given = [f"target.path={folder}", f"target.urls=[{engine.url}]", "generate.top_k=32"]
    greedy = ["sampling.temperature=0", "divergence.temperature=1"]
    return smoke(root, FLOAT, *given, *greedy, "draft=fresh", *words)


@pytest.mark.parametrize("source", ["draft", "target"])
def test_distill_needs_no_weights_of_the_target_and_its_alpha_holds_the_exact_one(
    tmp_path: Path,
    engine: Engine,
    weightless: str,
    source: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = asking(tmp_path, weightless, engine, f"source={source}")
    check(config)
    check_evaluate(config)
    folder = ensure(DISTILL, config)
    capsys.readouterr()
    show(config, folder)
    lines = capsys.readouterr().out.splitlines()
    assert any("INCONCLUSIVE: the target is behind HTTP" in line for line in lines)
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert (folder / "draft" / "model.safetensors").is_file()
    summary = read_json(folder / SUMMARY)
    assert summary["verdict"] == "inconclusive"
    assert summary["steps"] == config.optim.max_steps
    judged = read_json(ensure(EVALUATE, replace_judged(config)) / SUMMARY)
    assert "speedup" not in judged
    trained = with_path(models(config)[1], ensure(TRAIN, config) / "draft")
    target = load_target(
        replace(config.target, path=str(trained_target(FLOAT)), urls=[]), config.hardware
    )
    answers = read_contexts(ensure(CONTEXTS, config), "test")
    how: Any = {"sampling": config.sampling, "batch_size": 8}
    exact = estimates(score_contexts(target.adapter, load_draft(trained, target), answers, **how))
    low = judged["alpha"]["mean"]
    assert low - 1e-6 <= exact["alpha"].mean <= low + judged["alpha_error_bound"] + 1e-6


def replace_judged(config: Config) -> Config:
    """`config` as `distill` evaluates it."""
    return replace(config, evaluate=replace(config.evaluate, draft="trained"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["source=replay"], "verifies no proposals: use another source than replay"),
        (["divergence=reverse_kl"], "reverse KL needs those that the drafter likes"),
        (["sampling.repetition_penalty=1.1"], "without a repetition penalty"),
    ],
)
def test_what_an_engine_cannot_teach_is_one_line(
    tmp_path: Path, engine: Engine, weightless: str, words: list[str], why: str
) -> None:
    config = asking(tmp_path, weightless, engine, *words)
    with pytest.raises(ValueError, match=rf"^target\.urls: an engine .*{why}") as error:
        check(config)
    assert "\n" not in str(error.value)


def test_rows_leave_an_engine_the_token_that_it_writes(
    tmp_path: Path, engine: Engine, weightless: str
) -> None:
    words = ["data.max_length=100000", "data.max_prompt_tokens=100000"]
    context = context_of(ModelFolder(TargetConfig(path=weightless)).config)
    lengths = lengths_of(asking(tmp_path, weightless, engine, *words))
    assert lengths.window == lengths.prompt + lengths.completion == context - 1


@pytest.mark.parametrize("top_k", [0, 32])
def test_rows_that_an_engine_cannot_score_are_one_line(
    tmp_path: Path,
    engine: Engine,
    weightless: str,
    top_k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["source=fixed", f"generate.top_k={top_k}", "evaluate.max_new_tokens=4"]
    config = asking(tmp_path, weightless, engine, *words)
    monkeypatch.setattr(engine, "max_model_len", 48)  # of rows of 48 tokens, and one more
    with pytest.raises(ValueError, match=r"at most 47 tokens, and one has 48.*--max-model-len 49"):
        ensure(TRAIN, config)


def test_who_asks_an_engine_has_products_of_its_own(tmp_path: Path, engine: Engine) -> None:
    """An engine's kernels are others, so that no drafter is handed the texts of the other one."""
    folder = str(trained_target(FLOAT))
    asked = asking(tmp_path, folder, engine, "source=draft")
    ours = replace(asked, target=replace(asked.target, urls=[]), generate=Config().generate)
    for stage in (CONTEXTS, TRAIN, EVALUATE):
        assert plan(stage, asked).address != plan(stage, ours).address
    elsewhere = replace(asked, target=replace(asked.target, urls=["http://elsewhere:1"]))
    assert plan(EVALUATE, asked).address == plan(EVALUATE, elsewhere).address


def test_the_daemon_refits_and_gates_without_the_target(tmp_path: Path) -> None:
    """Records that carry no scores: the engine gives them to the loss and to the gate."""
    records = [
        replace(one, topk_ids=None, topk_log_probs=None, tail_mass=None, loss_tail_mass=None)
        for one in making.traffic(60)
    ]
    shop = Shop(tmp_path, records)
    with served(Engine(making.target(), [0], str)) as engine:
        target = remote(engine, top_k=making.TOP_K)
        shop.refit.judge.engines = replace(target, longest=len(records[0].prompt_ids) + 11)
        assert not all(map(shop.refit.judge.can_score, records))  # an engine needs room behind them
        shop.refit.judge.engines = target
        make = shop.refit.make_trainer

        def make_trainer(folder: Path) -> Trainer:
            trainer = make(folder)
            trainer.teacher = RemoteTeacher(target, 1.0)
            return trainer

        shop.refit.make_trainer = make_trainer
        update = shop.refit.update()
    assert update.version == "v000002"
    assert update.verdict.gain.low > 0
    traffic = shop.buffer.newest("default", 99, held_out=True)
    exact = [
        score_contexts(making.target(), load(path), traffic, sampling=None, batch_size=32).alpha
        for path in (version.path for version in shop.registry.versions())
    ]
    assert update.verdict.before.mean <= exact[0].mean
    assert update.verdict.after.mean <= exact[1].mean
    shop.buffer.close()
