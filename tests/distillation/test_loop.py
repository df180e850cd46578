"""Interrupted and resumed training ends as uninterrupted training does, and the best is kept."""

import pytest
import torch

from draftkit.distillation.checkpoint import read_notes
from draftkit.distillation.loop import BEST, CHECKPOINT, discard_state, train
from tests.distillation.bigram import trainer
from tests.distillation.making import text_source


class Killed(Exception):
    """The process ended here."""


def run(folder, make_source, kill_at=None, evaluate=None, **optim):
    learner = trainer(save_steps=4, eval_steps=6, **optim)
    losses = []

    def log(step, metrics):
        if step == kill_at:
            raise Killed
        losses.append((step, metrics["loss"]))

    train(learner, make_source(learner.draft), folder, evaluate=evaluate, log=log)
    return learner, losses


@pytest.fixture(autouse=True)
def _folders(tmp_path):
    for name in ("whole", "cut", "a", "b"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    ("alphas", "best"),
    [
        ({0: 0.5, 6: 0.4, 12: 0.3}, 0),
        ({0: 0.5, 6: 0.7, 12: 0.6}, 6),
        ({0: 0.5, 6: 0.6, 12: 0.7}, 12),
    ],
)
def test_the_weights_with_the_best_validation_alpha_are_kept(tmp_path, alphas, best):
    learner = trainer(save_steps=4, eval_steps=6)
    seen = {}

    def evaluate(step):
        seen[step] = learner.draft.table.detach().clone()
        return alphas[step]

    outcome = train(
        learner,
        text_source(learner.draft),
        tmp_path,
        evaluate=evaluate,
        log=lambda *_: None,
    )
    assert (outcome.best_step, outcome.best_alpha) == (best, alphas[best])
    assert torch.equal(learner.draft.table, seen[best])


NAN = float("nan")


@pytest.mark.parametrize(
    ("alphas", "best", "best_alpha"),
    [
        ([0.5, NAN, 0.4], 0, 0.5),
        ([0.5, 0.7, NAN], 6, 0.7),
        ([NAN, 0.3, NAN], 6, 0.3),
        ([NAN, NAN, NAN], 0, None),
    ],
)
def test_weights_whose_alpha_is_not_a_number_never_count_as_better(
    tmp_path, alphas, best, best_alpha
):
    learner = trainer(save_steps=4, eval_steps=6)
    seen = {}

    def evaluate(step):
        seen[step] = learner.draft.table.detach().clone()
        return alphas[step // 6]

    source = text_source(learner.draft)
    outcome = train(learner, source, tmp_path, evaluate=evaluate, log=lambda *_: None)
    assert (outcome.best_step, outcome.best_alpha) == (best, best_alpha)
    assert torch.equal(learner.draft.table, seen[best])


def test_a_kill_after_the_best_keeps_it(tmp_path):
    def evaluate(step):
        return {0: 0.5, 6: 0.9, 12: 0.4}[step]

    with pytest.raises(Killed):
        run(tmp_path, text_source, kill_at=8, evaluate=evaluate)
    learner = trainer(save_steps=4, eval_steps=6)
    outcome = train(
        learner,
        text_source(learner.draft),
        tmp_path,
        evaluate=evaluate,
        log=lambda *_: None,
    )
    assert outcome.best_step == 6


def test_a_kill_behind_the_checkpoint_leaves_the_better_weights_for_when_they_come_again(tmp_path):
    """Two files at any time, and none when the run is over."""

    def steps(kill_at):
        learner = trainer(save_steps=5, eval_steps=1)

        def log(step, metrics):
            files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
            assert files == [BEST, CHECKPOINT][: 1 + (step > 5)]
            if step == kill_at:
                raise Killed

        options = {"evaluate": lambda step: 0.1 - abs(step - 7) / 100, "log": log}
        return train(learner, text_source(learner.draft), tmp_path, **options)

    with pytest.raises(Killed):
        steps(kill_at=9)
    assert read_notes(tmp_path / BEST)["best_step"] == 7  # the checkpoint is of step 5
    outcome = steps(kill_at=None)
    assert (outcome.best_step, outcome.best_alpha, outcome.last_alpha) == (7, 0.1, 0.05)
    discard_state(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=rf"{CHECKPOINT}.*delete it"):
        run(tmp_path, text_source)
