"""Interrupted and resumed training ends as uninterrupted training does, and the best is kept."""

import pytest
import torch

from draftkit.distillation.loop import (
    BEST,
    CHECKPOINT,
    load_checkpoint,
    load_weights,
    read_notes,
    save_checkpoint,
    save_weights,
    train,
)
from tests.distillation.bigram import Bigram, batch_of, trainer
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
        learner, source_of("fixed", learner.draft), tmp_path, evaluate=evaluate, log=lambda *_: None
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


BATCH = ([1, 2, 3, 4], 1), ([7, 6, 5], 1)


def trained(steps, began=0):
    learner = trainer()
    learner.steps = began
    for _ in range(steps):
        learner.step(batch_of(*BATCH))
    return learner


@pytest.mark.parametrize("began", [0, 300])
def test_a_restored_trainer_goes_on_as_the_saved_one_would_have(tmp_path, began):
    """Also where a service trains on from another version: steps go on, moments begin at 0."""
    saved = trained(3, began)
    save_checkpoint(tmp_path / "c", saved, {"best_alpha": 0.25})
    restored = trainer(Bigram(9))
    assert load_checkpoint(tmp_path / "c", restored) == {"best_alpha": 0.25}
    assert (restored.steps, restored.tokens) == (saved.steps, saved.tokens)
    for learner in (saved, restored):
        learner.step(batch_of(*BATCH))
    assert torch.equal(saved.draft.table, restored.draft.table)


def test_without_the_moments_it_would_not(tmp_path):
    saved = trained(3)
    save_weights(tmp_path / "w", saved, {"best_step": 3})
    restored = trainer(Bigram(9))
    load_weights(tmp_path / "w", restored)
    assert read_notes(tmp_path / "w") == {"best_step": 3}
    assert torch.equal(saved.draft.table, restored.draft.table)
    for learner in (saved, restored):
        learner.step(batch_of(*BATCH))
    assert not torch.equal(saved.draft.table, restored.draft.table)


def test_a_checkpoint_before_the_first_step_is_whole(tmp_path):
    save_checkpoint(tmp_path / "c", trained(0), {})
    restored = trained(2)
    load_checkpoint(tmp_path / "c", restored)
    assert restored.steps == 0
    fresh = trained(0)
    for learner in (fresh, restored):
        learner.step(batch_of(*BATCH))
    assert torch.equal(fresh.draft.table, restored.draft.table)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, content):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a readable checkpoint.*delete it"):
        load_checkpoint(tmp_path / "c", trainer())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    other = trained(1)
    other.draft.table = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    save_checkpoint(tmp_path / "c", other, {})
    with pytest.raises(ValueError, match="does not fit this model"):
        load_checkpoint(tmp_path / "c", trainer())
