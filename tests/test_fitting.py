"""The learning rate is the best of those tried, and a trial that has ended is not run again."""

import math
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from accelerate import PartialState

from draftkit.artifacts import read_json
from draftkit.distillation.loop import Outcome
from draftkit.tracking import Tracker, read_metrics
from pipelines import fitting
from pipelines.configuration import compose_config
from pipelines.distill import distill
from pipelines.prepare import prepare
from pipelines.stage import StageFolder
from tests.launching import free_port


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fitting")


def smoke(root: Path, *overrides: str):
    plain = ["+experiment=smoke", f"root={root}", "tracker=none", "source=fixed"]
    return compose_config([*plain, *overrides])


def test_the_best_rate_of_the_trials_trains(root, monkeypatch):
    monkeypatch.setattr("pipelines.distill.judge", lambda config: {})
    config = smoke(root, "name=rates", "optim.rate_factors=[0.001,1,1000]", "optim.max_steps=12")
    prepare.ensure(config)
    folder = distill.ensure(config)
    by_rate = read_json(folder / "summary.json")["alpha_by_rate"]
    assert len(by_rate) == 3
    best = max(by_rate, key=by_rate.get)
    lines = read_metrics(folder / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if line["section"] == "train"]
    assert max(rates) == pytest.approx(float(best), rel=0.01)
    trials = {line["section"] for line in lines if line["section"].startswith("rate_")}
    assert trials == {
        f"rate_{factor}{part}" for factor in ("0.001", "1", "1000") for part in ("", "_validation")
    }
    steps = [line["step"] for line in lines if line["section"] == "rate_1"]
    assert max(steps) == 12 // fitting.TRIAL_SHARE


def test_trials_that_have_ended_are_not_run_again(root, monkeypatch):
    monkeypatch.setattr("pipelines.distill.judge", lambda config: {})
    config = smoke(root, "name=again", "optim.rate_factors=[0.5,1]", "optim.max_steps=8")
    run, ran = fitting.run, []

    def killed(config, folder, optim, path, name):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(name)
        return run(config, folder, optim, path, name)

    monkeypatch.setattr(fitting, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        distill.ensure(config)
    ran.append("killed")
    distill.ensure(config)
    assert ran == ["rate_0.5", "killed", "rate_1", "train"]


def test_a_trial_that_diverges_loses(root, monkeypatch):
    monkeypatch.setattr("pipelines.distill.judge", lambda config: {})
    options = ["optim.rate_factors=[1,1e30]", "optim.learning_rate=1e-3", "optim.max_steps=12"]
    folder = distill.ensure(smoke(root, "name=diverging", *options))
    by_rate = read_json(folder / "summary.json")["alpha_by_rate"]
    assert 0 < by_rate["1.00e-03"] < 1
    assert by_rate["1.00e+27"] is None
    ended = read_json(folder / "rates" / "1e+30" / "alpha.json")
    assert "lower optim.learning_rate" in ended["error"]
    lines = read_metrics(folder / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if line["section"] == "train"]
    assert max(rates) == pytest.approx(1e-3)


def test_a_rate_without_an_alpha_never_wins(root, monkeypatch):
    alphas = {"rate_1": math.nan, "rate_2": 0.5, "rate_3": math.nan, "rate_4": 0.4}

    def run(config, folder, optim, path, name):
        return name, Outcome(1, 0, 0, None, alphas.get(name))

    monkeypatch.setattr(fitting, "run", run)
    config = smoke(root, "optim.rate_factors=[1,2,3,4]", "optim.learning_rate=1")
    folder = StageFolder(root / "without", Tracker(None))
    for _ in range(2):  # also where the trials have ended
        name, _, tried = fitting.fit(config, folder)
        assert name == fitting.TRAIN
        assert tried == {1.0: None, 2.0: 0.5, 3.0: None, 4.0: 0.4}
        assert max(fitting.finite(tried), key=tried.get) == 2.0


def test_where_all_trials_diverge_it_is_one_line(root, monkeypatch):
    def diverge(trainer, *arguments, **options):
        raise ValueError("the loss became nan at step 1: lower optim.learning_rate")

    monkeypatch.setattr(fitting, "train", diverge)
    config = smoke(root, "name=all", "optim.rate_factors=[1,2]", "optim.learning_rate=1")
    with pytest.raises(
        ValueError, match=r"^optim\.rate_factors: .*\(1.00e.00, 2.00e.00\)"
    ) as error:
        distill.ensure(config)
    assert str(error.value).endswith("the loss became nan at step 1: lower optim.learning_rate")


def test_trouble_beside_training_is_no_verdict_on_a_rate(root, monkeypatch):
    def refuse(*arguments):
        raise ValueError("data.path rows.jsonl: no such file")

    config = smoke(root, "name=beside", "optim.rate_factors=[1,2]", "optim.learning_rate=1")
    monkeypatch.setattr(fitting, "make_source", refuse)
    with pytest.raises(ValueError, match=r"^data\.path"):
        distill.ensure(config)
    assert not list(distill.path(config).rglob("alpha.json"))


def choose_as(rank: int, port: int, root: Path, found: Connection) -> None:
    """In a process of two: choose a rate by trials that end in other alphas on each of them."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    PartialState._reset_state()

    def run(config, folder, optim, path, name):
        return None, Outcome(2, 0, 2, 0.0, optim.learning_rate / 10 + rank)

    fitting.run = run
    config = smoke(root, "optim.rate_factors=[0.5,1,2]", "optim.learning_rate=1")
    folder = StageFolder(root / str(rank), Tracker(None), is_main=rank == 0)
    found.send(fitting.choose_rate(config, folder))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_several_processes_take_the_alpha_of_the_first_one(tmp_path):
    """They need not see its files: not yet, or, as here, not at all."""
    forking, port = multiprocessing.get_context("fork"), free_port()
    ends = [forking.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        forking.Process(target=choose_as, args=(rank, port, tmp_path, end[1]), daemon=True)
        for rank, end in enumerate(ends)
    ]
    for process in ranks:
        process.start()
    for _, written in ends:
        written.close()  # so that a process that ends without an answer is noticed
    assert [read.recv() for read, _ in ends] == 2 * [{0.5: 0.05, 1.0: 0.1, 2.0: 0.2}]
    for process in ranks:
        process.join()
        assert process.exitcode == 0


def test_weights_that_are_to_draft_by_argmax_are_chosen_by_what_that_accepts(root, monkeypatch):
    monkeypatch.setattr("pipelines.distill.judge", lambda config: {})
    options = ["divergence=ce_argmax", "optim.max_steps=12", "optim.eval_steps=3"]
    folder = distill.ensure(smoke(root, "name=argmax", *options))
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "alpha" in line]
    judged = {
        line["step"]: line["alpha_greedy_draft"]
        for line in lines
        if line["section"] == "validation"
    }
    best = read_json(folder / "summary.json")["best_step"]
    assert best == max(judged, key=judged.get) > 0
