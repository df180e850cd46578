"""Interrupted and resumed training ends as uninterrupted training does, and the best is kept."""

import pytest
import torch

from draftkit.distillation.checkpoint import read_notes
from draftkit.distillation.loop import BEST, CHECKPOINT, train
from tests.distillation.bigram import trainer
from tests.distillation.making import Killed, source_of

NAN = float("nan")


@pytest.mark.parametrize(
    ("alphas", "best", "best_alpha"),
    [
        ([0.5, 0.4, 0.3], 0, 0.5),
        ([0.5, 0.7, 0.6], 6, 0.7),
        ([0.5, 0.6, 0.7], 12, 0.7),
        ([0.5, NAN, 0.4], 0, 0.5),
        ([0.5, 0.7, NAN], 6, 0.7),
        ([NAN, 0.3, NAN], 6, 0.3),
        ([NAN, NAN, NAN], 0, None),
    ],
)
def test_the_weights_with_the_best_validation_alpha_are_kept(tmp_path, alphas, best, best_alpha):
    """An alpha that is no number never counts as better."""
    learner = trainer(save_steps=4, eval_steps=6)
    seen = {}

    def evaluate(step):
        seen[step] = learner.draft.table.detach().clone()
        return alphas[step // 6]

    outcome = train(
        learner,
        source_of("fixed", learner.draft),
        tmp_path,
        evaluate=evaluate,
        log=lambda *_: None,
    )
    assert (outcome.best_step, outcome.best_alpha) == (best, best_alpha)
    assert torch.equal(learner.draft.table, seen[best])


@pytest.mark.parametrize("kill_at", [9, 11])  # the checkpoint is of step 5, or of step 10
def test_a_kill_before_or_behind_the_next_checkpoint_keeps_the_best(tmp_path, kill_at):
    """Two files at any time."""

    def steps(kill_at):
        learner = trainer(save_steps=5, eval_steps=1)

        def log(step, metrics):
            files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
            assert files == [BEST, CHECKPOINT][: 1 + (step > 5)]
            if step == kill_at:
                raise Killed

        options = {"evaluate": lambda step: 0.1 - abs(step - 7) / 100, "log": log}
        return train(learner, source_of("fixed", learner.draft), tmp_path, **options)

    with pytest.raises(Killed):
        steps(kill_at)
    assert read_notes(tmp_path / BEST)["best_step"] == 7
    outcome = steps(kill_at=None)
    assert (outcome.best_step, outcome.best_alpha) == (7, 0.1)
