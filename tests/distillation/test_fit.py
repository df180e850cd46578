"""How a drafter that was cut begins, what chooses its weights, and who fits it together."""

from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.config import Config, DivergenceConfig, DraftConfig, TargetConfig
from draftkit.config.text import PardConfig, ShrinkConfig
from draftkit.distillation import fit
from draftkit.distillation.assembly import load_teaching_target
from draftkit.distillation.fit import PLAIN_SHARE, with_warmup
from draftkit.distillation.loop import Outcome
from draftkit.evaluation.intervals import Estimate
from draftkit.models.loading import save_model
from draftkit.models.shapes import layer_stack
from draftkit.tracking import FILE_NAME, Tracker, read_metrics
from tests import tiny
from tests.distillation.fittings import CONFIG, config_of, fitted
from tests.launching import fork_ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.model()
    save_model(target, tiny.byte_tokenizer(), folder / "target")
    save_model(tiny.related(target), tiny.byte_tokenizer(), folder / "draft")
    return folder


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
        config = replace(config_of(max_steps=4), divergence=divergence)
        monkeypatch.setattr(
            fit, "estimates", lambda scored, alpha=alpha: {"alpha": Estimate(alpha, 0, 1, 9, 9, 9)}
        )
        folder = tmp_path / f"{alpha}-{name}-{warm}"
        fitted(pair, folder, config, note=notes.append)
        validations = [
            line for line in read_metrics(folder / FILE_NAME) if line["section"] == "validation"
        ]
        assert [line["step"] for line in validations] == [0, 4]
        assert ["next to no gradient" in note for note in notes].count(True) == expected


def fit_in_parts(pair: Path, root: Path, config: Config) -> Outcome:
    """In a process of two: fit with half of the target's layers."""
    target = load_teaching_target(
        TargetConfig(path=str(pair / "target")), config.hardware, stored=False
    )
    held = sum(weight.numel() for weight in layer_stack(target.adapter.model)[1].parameters())
    local = [weight.to_local() for weight in layer_stack(target.adapter.model)[1].parameters()]
    assert sum(weight.numel() for weight in local) < 0.6 * held
    return fitted(pair, root, config, target=target, tracker=Tracker(None)).outcome


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_that_share_the_target_fit_as_one_does(pair, tmp_path):
    rows = {"per_device_train_batch_size": 2}
    alone = fitted(pair, tmp_path / "one", config_of(gradient_accumulation_steps=2, **rows)).outcome
    parts = replace(config_of(**rows), hardware=replace(CONFIG.hardware, shard_target=True))
    first, second = fork_ranks(fit_in_parts, pair, tmp_path / "two", parts)
    assert first == second
    assert first.best_step == alone.best_step > 0
    assert first.best_alpha == pytest.approx(alone.best_alpha, rel=1e-4)
    assert first.tokens == alone.tokens


def test_weights_that_are_to_draft_by_argmax_are_chosen_by_what_that_accepts(pair, tmp_path):
    config = config_of(max_steps=12, eval_steps=3)
    config = replace(config, divergence=DivergenceConfig(name="ce_argmax"))
    outcome = fitted(pair, tmp_path, config).outcome
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "alpha" in line]
    held_out = {line["step"]: line for line in lines if line["section"] == "validation"}
    judged = {step: line["alpha_greedy_draft"] for step, line in held_out.items()}
    best = outcome.best_step
    assert len(judged) == 5
    assert judged[best] == max(judged.values()) == pytest.approx(outcome.best_alpha)
    assert judged[best] != pytest.approx(held_out[best]["alpha"], rel=0.1)
