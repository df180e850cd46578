"""The learning rate is the best of those tried, and a trial that has ended is not run again."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from draftkit.config import Config, DivergenceConfig, DraftConfig, TargetConfig
from draftkit.config.text import PardConfig, ShrinkConfig
from draftkit.distillation import fit
from draftkit.distillation.assembly import load_teaching_target
from draftkit.distillation.fit import PLAIN_SHARE, TRAIN, TRIAL_SHARE, Fitting, with_warmup
from draftkit.distillation.loop import Outcome
from draftkit.distillation.trainer import TrainingFailed
from draftkit.models.loading import save_model
from draftkit.models.shrink import layer_stack
from draftkit.theory.acceptance import Estimate
from draftkit.tracking import Tracker, read_metrics
from tests import tiny
from tests.distillation.fittings import CONFIG, config_of, make_fitting
from tests.launching import fork_ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.model()
    save_model(target, tiny.byte_tokenizer(), folder / "target")
    save_model(tiny.related(target), tiny.byte_tokenizer(), folder / "draft")
    return folder


def ended(alpha: float | None) -> Outcome:
    """What a run returns that ended with `alpha`."""
    return Outcome(steps=1, tokens=0, best_step=0, best_alpha=None, last_alpha=alpha)


def test_the_best_rate_of_the_trials_trains(pair, tmp_path):
    config = config_of(rate_factors=[1e-3, 1, 1e3], max_steps=12)
    fitted = make_fitting(pair, tmp_path, config).run()
    by_rate = fitted.alpha_by_rate
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
    assert max(steps) == 12 // TRIAL_SHARE
    config = config_of(learning_rate=best, max_steps=12)
    assert make_fitting(pair, tmp_path / "alone", config).run().outcome == fitted.outcome


def test_a_cold_cut_begins_with_forward_kl_unless_told_otherwise():
    def steps(cut, divergence, path=None):
        draft = DraftConfig(path=path, shrink=cut)
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


def test_a_cold_cut_learns_its_first_proposal_first_unless_told_otherwise():
    def share(cut, kind="pard", path=None, **pard):
        draft = DraftConfig(kind=kind, path=path, shrink=cut, pard=PardConfig(**pard))
        return with_warmup(replace(CONFIG, draft=draft)).draft.pard.plain_share

    cut = ShrinkConfig(layers=2)
    assert share(cut) == PLAIN_SHARE
    assert share(cut, plain_share=0.2) == 0.2
    assert share(cut, "plain") is None
    assert share(ShrinkConfig(layers=2, steps=5)) is None
    assert share(ShrinkConfig(), path="a/draft") is None


def test_a_divergence_without_a_gradient_at_the_start_is_said(pair, tmp_path, monkeypatch):
    for alpha, name, warm, expected in (
        (0.01, "tvd", None, True),
        (0.01, "tvd", 3, False),
        (0.01, "forward_kl", None, False),
        (0.2, "tvd", None, False),
    ):
        notes = []
        divergence = DivergenceConfig(name=name, warmup_steps=warm)
        config = replace(CONFIG, divergence=divergence)
        fitting = make_fitting(pair, tmp_path, config, note=notes.append)
        monkeypatch.setattr(
            fit,
            "estimates",
            lambda scored, alpha=alpha: {"alpha": Estimate(alpha, 0, 1, 9, 9, 9)},
        )
        fitting.alpha("validation", 5)
        assert notes == []
        fitting.alpha("validation", 0)
        assert [("next to no gradient" in note) for note in notes] == [True] * expected


def test_trials_that_have_ended_are_not_run_again(pair, tmp_path, monkeypatch):
    config = config_of(rate_factors=[0.5, 1])
    run, ran = Fitting.train, []

    def killed(self, optim, folder, name):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(name)
        return run(self, optim, folder, name)

    monkeypatch.setattr(Fitting, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        make_fitting(pair, tmp_path, config).run()
    ran.append("killed")
    make_fitting(pair, tmp_path, config).run()
    assert ran == ["rate_0.5", "killed", "rate_1", "train"]


def test_a_trial_that_diverges_loses(pair, tmp_path):
    config = config_of(rate_factors=[1, 1e30])
    by_rate = make_fitting(pair, tmp_path, config).run().alpha_by_rate
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

    def run(self, optim, folder, name):
        names.append((name, optim.learning_rate))
        return ended(alphas.get(name))

    monkeypatch.setattr(Fitting, "train", run)
    config = config_of(rate_factors=[1, 2, 3, 4], learning_rate=1.0)
    for _ in range(2):  # also where the trials have ended
        tried = make_fitting(pair, tmp_path, config).run().alpha_by_rate
        assert names[-1] == (TRAIN, 2.0)
        assert tried == {1.0: None, 2.0: 0.5, 3.0: None, 4.0: 0.4}


def test_where_all_trials_diverge_it_is_one_line(pair, tmp_path, monkeypatch):
    def diverge(trainer, *arguments, **options):
        raise TrainingFailed("the loss became nan at step 1: lower optim.learning_rate")

    monkeypatch.setattr(fit, "train", diverge)
    config = config_of(rate_factors=[1, 2], learning_rate=1.0)
    with pytest.raises(
        ValueError, match=r"^optim\.rate_factors: .*\(1.00e.00, 2.00e.00\)"
    ) as error:
        make_fitting(pair, tmp_path, config).run()
    assert str(error.value).endswith("the loss became nan at step 1: lower optim.learning_rate")


def test_trouble_beside_training_is_no_verdict_on_a_rate(pair, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("data.path rows.jsonl: no such file")

    monkeypatch.setattr(fit, "make_source", refuse)
    with pytest.raises(ValueError, match=r"^data\.path"):
        make_fitting(pair, tmp_path, config_of(rate_factors=[1, 2])).run()
    assert not list(tmp_path.rglob("alpha.json"))


def choose_as(pair: Path, root: Path) -> dict[float, float | None]:
    """In a process of two: choose a rate by trials that end in other alphas on each of them."""
    rank = int(os.environ["RANK"])
    Fitting.train = lambda self, optim, folder, name: ended(optim.learning_rate / 10 + rank)
    config = config_of(rate_factors=[0.5, 1, 2], learning_rate=1.0)
    return make_fitting(pair, root / str(rank), config).choose_rate()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_several_processes_take_the_alpha_of_the_first_one(pair, tmp_path):
    """They need not see its files: not yet, or, as here, not at all."""
    make_fitting(pair, tmp_path)  # so that no forked process has to sample
    assert fork_ranks(choose_as, pair, tmp_path) == 2 * [{0.5: 0.05, 1.0: 0.1, 2.0: 0.2}]


def fit_in_parts(
    pair: Path, root: Path, config: Config
) -> tuple[Outcome, dict[float, float | None]]:
    """In a process of two: fit with half of the target's layers."""
    target = load_teaching_target(
        TargetConfig(path=str(pair / "target")), config.hardware, stored=False
    )
    held = sum(weight.numel() for weight in layer_stack(target.adapter.model)[1].parameters())
    local = [weight.to_local() for weight in layer_stack(target.adapter.model)[1].parameters()]
    assert sum(weight.numel() for weight in local) < 0.6 * held
    fitted = make_fitting(pair, root, config, target=target, tracker=Tracker(None)).run()
    return fitted.outcome, fitted.alpha_by_rate


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_that_share_the_target_fit_as_one_does(pair, tmp_path):
    """Through two trials and the run, for which its layers are split once."""
    tries = {"rate_factors": [0.5, 1], "per_device_train_batch_size": 2}
    config = config_of(gradient_accumulation_steps=2, **tries)
    alone = make_fitting(pair, tmp_path / "one", config).run()
    parts = replace(config_of(**tries), hardware=replace(CONFIG.hardware, shard_target=True))
    first, second = fork_ranks(fit_in_parts, pair, tmp_path / "two", parts)
    assert first == second
    assert first[0].last_alpha == pytest.approx(alone.outcome.last_alpha, rel=1e-4)
    assert first[0].tokens == alone.outcome.tokens
    assert first[1] == pytest.approx(alone.alpha_by_rate, rel=1e-4)


def test_weights_that_are_to_draft_by_argmax_are_chosen_by_what_that_accepts(pair, tmp_path):
    config = config_of(max_steps=12, eval_steps=3)
    config = replace(config, divergence=DivergenceConfig(name="ce_argmax"))
    outcome = make_fitting(pair, tmp_path, config).run().outcome
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "alpha" in line]
    held_out = {line["step"]: line for line in lines if line["section"] == "validation"}
    judged = {step: line["alpha_greedy_draft"] for step, line in held_out.items()}
    best = outcome.best_step
    assert len(judged) == 5
    assert judged[best] == max(judged.values()) == pytest.approx(outcome.best_alpha)
    assert judged[best] != pytest.approx(held_out[best]["alpha"], rel=0.1)
