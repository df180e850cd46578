"""The learning rate is the best of those tried, and a trial that has ended is not run again."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from draftkit.config import Config, DivergenceConfig, ModelConfig
from draftkit.config.text import ShrinkConfig
from draftkit.distillation import fit as fitting
from draftkit.distillation.fit import (
    Fitted,
    choose_rate,
    fit,
    load_teaching_target,
    with_warmup,
)
from draftkit.distillation.loop import Outcome
from draftkit.models.loading import load_draft, save_model
from draftkit.models.sharding import layers_of
from draftkit.theory.acceptance import Estimate
from draftkit.tracking import Tracker, read_metrics
from tests import tiny
from tests.distillation.jobs import CONFIG, config_of, make_job
from tests.launching import fork_ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.model()
    save_model(target, tiny.byte_tokenizer(), folder / "target")
    save_model(tiny.related(target), tiny.byte_tokenizer(), folder / "draft")
    return folder


def ended(alpha: float | None) -> Fitted:
    """What a run returns that ended with `alpha`."""
    outcome = Outcome(0, None, alpha, steps=1, tokens=0)
    return Fitted(None, None, outcome)  # type: ignore[arg-type]


def test_the_best_rate_of_the_trials_trains(pair, tmp_path):
    job = make_job(pair, tmp_path, config_of(rate_factors=[1e-3, 1, 1e3], max_steps=12))
    by_rate = fit(job).alpha_by_rate
    assert len(by_rate) == 3
    best = max(by_rate, key=by_rate.get)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if line["section"] == "train"]
    assert max(rates) == pytest.approx(best, rel=0.01)
    trials = {line["section"] for line in lines if line["section"].startswith("rate_")}
    assert trials == {
        f"rate_{factor}{part}" for factor in ("0.001", "1", "1000") for part in ("", "_validation")
    }
    steps = [line["step"] for line in lines if line["section"] == "rate_1"]
    assert max(steps) == 12 // fitting.TRIAL_SHARE


def test_a_cold_cut_begins_with_forward_kl_unless_told_otherwise():
    def steps(cut, divergence, path=None):
        draft = ModelConfig(path=path, shrink=cut)
        config = replace(config_of(max_steps=50), draft=draft, divergence=divergence)
        return with_warmup(config).divergence.warmup_steps

    cut, tvd = ShrinkConfig(layers=2), DivergenceConfig(name="tvd")
    assert steps(cut, tvd) == 10
    assert steps(cut, DivergenceConfig(name="jsd")) == 10
    assert steps(cut, DivergenceConfig(name="tvd", warmup_steps=0)) == 0
    assert steps(cut, DivergenceConfig(name="lk_hybrid")) is None
    assert steps(ShrinkConfig(layers=2, steps=5), tvd) is None
    assert steps(ShrinkConfig(), tvd) is None
    assert steps(ShrinkConfig(), tvd, path="a/draft") is None


def test_a_divergence_without_a_gradient_at_the_start_is_said(pair, tmp_path, monkeypatch):
    for alpha, name, warm, expected in (
        (0.01, "tvd", None, True),
        (0.01, "tvd", 3, False),
        (0.01, "forward_kl", None, False),
        (0.2, "tvd", None, False),
    ):
        notes = []
        divergence = DivergenceConfig(name=name, warmup_steps=warm)
        job = make_job(pair, tmp_path, replace(CONFIG, divergence=divergence), note=notes.append)
        monkeypatch.setattr(
            fitting,
            "estimates",
            lambda scored, alpha=alpha: {"alpha": Estimate(alpha, 0, 1, 9, 9, 9)},
        )
        draft = load_draft(job.start, job.target)
        fitting.validation_alpha(job, draft, "validation", 5)
        assert notes == []
        fitting.validation_alpha(job, draft, "validation", 0)
        assert [("next to no gradient" in note) for note in notes] == [True] * expected


def test_what_was_fitted_is_saved_as_a_folder_that_loads(pair, tmp_path):
    job = make_job(pair, tmp_path)
    fitted = fit(job)
    fitted.save(tmp_path / "saved")
    start = load_draft(job.start, job.target).model.state_dict()
    saved = load_draft(replace(job.start, path=str(tmp_path / "saved")), job.target)
    assert fitted.outcome.best_step > 0
    for name, weight in saved.model.state_dict().items():
        assert weight.equal(fitted.draft.model.state_dict()[name])
    assert any(not weight.equal(start[name]) for name, weight in saved.model.state_dict().items())


def test_trials_that_have_ended_are_not_run_again(pair, tmp_path, monkeypatch):
    job = make_job(pair, tmp_path, config_of(rate_factors=[0.5, 1]))
    run, ran = fitting.fit_once, []

    def killed(job, optim, folder, name):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(name)
        return run(job, optim, folder, name)

    monkeypatch.setattr(fitting, "fit_once", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(job)
    ran.append("killed")
    fit(job)
    assert ran == ["rate_0.5", "killed", "rate_1", "train"]


def test_a_trial_that_diverges_loses(pair, tmp_path):
    by_rate = fit(make_job(pair, tmp_path, config_of(rate_factors=[1, 1e30]))).alpha_by_rate
    assert 0 < by_rate[3e-4] < 1
    assert by_rate[3e-4 * 1e30] is None
    result = read_json(tmp_path / "rates" / "1e+30" / "alpha.json")
    assert "lower optim.learning_rate" in result["error"]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if line["section"] == "train"]
    assert max(rates) == pytest.approx(3e-4)


def test_a_rate_without_an_alpha_never_wins(pair, tmp_path, monkeypatch):
    alphas = {"rate_1": math.nan, "rate_2": 0.5, "rate_3": math.nan, "rate_4": 0.4}
    names = []

    def run(job, optim, folder, name):
        names.append((name, optim.learning_rate))
        return ended(alphas.get(name))

    monkeypatch.setattr(fitting, "fit_once", run)
    config = config_of(rate_factors=[1, 2, 3, 4], learning_rate=1.0)
    for _ in range(2):  # also where the trials have ended
        tried = fit(make_job(pair, tmp_path, config)).alpha_by_rate
        assert names[-1] == (fitting.TRAIN, 2.0)
        assert tried == {1.0: None, 2.0: 0.5, 3.0: None, 4.0: 0.4}


def test_where_all_trials_diverge_it_is_one_line(pair, tmp_path, monkeypatch):
    def diverge(trainer, *arguments, **options):
        raise ValueError("the loss became nan at step 1: lower optim.learning_rate")

    monkeypatch.setattr(fitting, "train_logged", diverge)
    config = config_of(rate_factors=[1, 2], learning_rate=1.0)
    with pytest.raises(
        ValueError, match=r"^optim\.rate_factors: .*\(1.00e.00, 2.00e.00\)"
    ) as error:
        fit(make_job(pair, tmp_path, config))
    assert str(error.value).endswith("the loss became nan at step 1: lower optim.learning_rate")


def test_trouble_beside_training_is_no_verdict_on_a_rate(pair, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("data.path rows.jsonl: no such file")

    monkeypatch.setattr(fitting, "make_source", refuse)
    with pytest.raises(ValueError, match=r"^data\.path"):
        fit(make_job(pair, tmp_path, config_of(rate_factors=[1, 2])))
    assert not list(tmp_path.rglob("alpha.json"))


def test_the_width_of_a_draft_is_known_without_its_weights(pair, tmp_path, monkeypatch):
    """The rate that factors multiply depends on it."""
    monkeypatch.setattr(fitting, "fit_once", lambda *_: ended(0.5))
    config = config_of(rate_factors=[1, 2], learning_rate=None)
    base = fitting.learning_rate_for(64)
    assert fit(make_job(pair, tmp_path, config)).alpha_by_rate == {base: 0.5, 2 * base: 0.5}


def choose_as(pair: Path, root: Path) -> dict[float, float | None]:
    """In a process of two: choose a rate by trials that end in other alphas on each of them."""
    rank = int(os.environ["RANK"])
    fitting.fit_once = lambda job, optim, folder, name: ended(optim.learning_rate / 10 + rank)
    config = config_of(rate_factors=[0.5, 1, 2], learning_rate=1.0)
    return choose_rate(make_job(pair, root / str(rank), config, is_main=rank == 0))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_several_processes_take_the_alpha_of_the_first_one(pair, tmp_path):
    """They need not see its files: not yet, or, as here, not at all."""
    make_job(pair, tmp_path)  # so that no forked process has to sample
    assert fork_ranks(choose_as, pair, tmp_path) == 2 * [{0.5: 0.05, 1.0: 0.1, 2.0: 0.2}]


def fit_in_parts(
    pair: Path, root: Path, config: Config
) -> tuple[Outcome, dict[float, float | None]]:
    """In a process of two: fit with half of the target's layers."""
    target = load_teaching_target(
        ModelConfig(path=str(pair / "target")), config.hardware, stored=False
    )
    held = sum(weight.numel() for weight in layers_of(target.adapter.model).parameters())
    local = [weight.to_local() for weight in layers_of(target.adapter.model).parameters()]
    assert sum(weight.numel() for weight in local) < 0.6 * held
    is_main = os.environ["RANK"] == "0"
    options = {"target": target, "is_main": is_main, "tracker": Tracker(None)}
    fitted = fit(make_job(pair, root, config, **options))
    return fitted.outcome, fitted.alpha_by_rate


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_that_share_the_target_fit_as_one_does(pair, tmp_path):
    """Through two trials and the run, for which its layers are split once."""
    tries = {"rate_factors": [0.5, 1], "per_device_train_batch_size": 2}
    alone = fit(make_job(pair, tmp_path / "one", config_of(gradient_accumulation_steps=2, **tries)))
    parts = replace(config_of(**tries), hardware=replace(CONFIG.hardware, shard_target=True))
    first, second = fork_ranks(fit_in_parts, pair, tmp_path / "two", parts)
    assert first == second
    assert first[0].last_alpha == pytest.approx(alone.outcome.last_alpha, rel=1e-4)
    assert first[0].tokens == alone.outcome.tokens
    assert first[1] == pytest.approx(alone.alpha_by_rate, rel=1e-4)


def test_weights_that_are_to_draft_by_argmax_are_chosen_by_what_that_accepts(pair, tmp_path):
    config = config_of(max_steps=12, eval_steps=3)
    config = replace(config, divergence=DivergenceConfig(name="ce_argmax"))
    outcome = fit(make_job(pair, tmp_path, config)).outcome
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "alpha" in line]
    held_out = {line["step"]: line for line in lines if line["section"] == "validation"}
    judged = {step: line["alpha_greedy_draft"] for step, line in held_out.items()}
    best = outcome.best_step
    assert len(judged) == 5
    assert judged[best] == max(judged.values()) == pytest.approx(outcome.best_alpha)
    assert judged[best] != pytest.approx(held_out[best]["alpha"], rel=0.1)


def test_a_job_is_the_same_again(pair, tmp_path):
    """Nothing of one run is left in another."""
    first, again = (fit(make_job(pair, tmp_path / name, CONFIG)) for name in ("a", "b"))
    assert first.outcome == again.outcome
    for one, other in zip(first.draft.parameters(), again.draft.parameters(), strict=True):
        assert one.equal(other)
