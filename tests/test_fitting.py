"""The learning rate is the best of those tried, and a trial that has ended is not run again."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from draftkit.tracking import read_metrics
from pipelines import fitting
from pipelines.configuration import compose_config
from pipelines.distill import distill
from pipelines.prepare import prepare


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
