"""A checkpoint holds all that resuming needs, in safetensors, and nothing half-written."""

import pytest
import torch

from draftkit.distillation.checkpoint import (
    load_checkpoint,
    load_weights,
    read_notes,
    save_checkpoint,
    save_weights,
)
from tests.distillation.bigram import Bigram, batch_of, trainer

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
