"""Rows side by side or packed: the same tokens, the same predictions, the same gradient."""

import pytest
import torch

from draftkit.config import DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.distillation.batch import TokenSequence, collate, packed
from draftkit.distillation.teacher import TargetTeacher
from draftkit.distillation.trainer import Trainer
from tests import tiny

CPU = torch.device("cpu")


def text(*ids, prompt=1, **facts):
    return TokenSequence(list(ids), [i >= prompt for i in range(len(ids))], **facts)


TEXTS = [text(1, 2, 3, 4, 5, prompt=2), text(6, 7), text(8, 9, 10, 11), text(12, 13, 14)]


def test_packed_rows_hold_whole_texts_and_every_text_once():
    groups = packed(TEXTS, 7)
    assert [[len(row.token_ids) for row in group] for group in groups] == [[5, 2], [4, 3]]
    assert sorted(row.token_ids for group in groups for row in group) == sorted(
        row.token_ids for row in TEXTS
    )
    alone = packed([text(*range(9)), text(1, 2)], 7)
    assert [[len(row.token_ids) for row in group] for group in alone] == [[9], [2]]


def test_packing_keeps_where_texts_begin():
    batch = collate(TEXTS, device=CPU, packed_length=7)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert batch.segments.tolist() == [[1] * 5 + [2] * 2, [1] * 4 + [2] * 3]
    assert batch.token_ids.tolist() == [3, 4, 5, 7, 9, 10, 11, 13, 14]
    # The last token of a text predicts nothing of the next.
    predicting = [
        [False, True, True, True, False, True, False],
        [True] * 3 + [False, True, True, False],
    ]
    assert batch.predicting.tolist() == predicting
    assert len(batch.texts.unique()) == 4
    assert batch.texts.tolist() == sorted(batch.texts.tolist())


def test_a_text_that_claims_its_first_token_was_generated_predicts_it_from_nothing():
    batch = collate([text(1, 2), text(3, 4, prompt=0)], device=CPU, packed_length=4)
    assert batch.token_ids.tolist() == [2, 4]


def trainer(architecture):
    return Trainer(
        tiny.adapter(architecture, seed=1, dtype=torch.float64),
        TargetTeacher(tiny.adapter(architecture, seed=2, dtype=torch.float64)),
        optim=OptimConfig(learning_rate=1e-3, max_steps=2, warmup_steps=0),
        divergence=DivergenceConfig(),
        sampling=SamplingConfig(),
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mistral"])
def test_a_packed_batch_takes_the_same_step(architecture):
    side_by_side, together = trainer(architecture), trainer(architecture)
    long = [text(*range(20, 50), prompt=7), *TEXTS]  # beyond a sliding window
    first = side_by_side.step(collate(long, device=CPU))
    second = together.step(collate(long, device=CPU, packed_length=32))
    assert second.loss == pytest.approx(first.loss, rel=1e-12)
    assert second.tokens == first.tokens
    for one, other in zip(
        side_by_side.draft.parameters(), together.draft.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_micro_batches_carry_all_that_is_known_of_their_rows():
    rows = [
        text(1, 2, 3, rejected=[False, True, False], block_offset=[0, 0, 1]),
        text(4, 5, rejected=[False, True], block_offset=[0, 2]),
    ]
    whole = collate(rows, device=CPU, sampler_version="step 3")
    first, second = whole.micro_batches(2)
    assert second.input_ids.tolist() == [[4, 5]]
    assert second.rejected.tolist() == [[False, True]]
    assert second.block_offset.tolist() == [[0, 2]]
    assert first.sampler_version == second.sampler_version == "step 3"
    assert first.generated(first.rejected).tolist() == [True, False]


def test_facts_that_some_row_lacks_are_left_out():
    rows = [text(1, 2, rejected=[False, True]), text(3, 4)]
    assert collate(rows, device=CPU).rejected is None


def test_a_batch_without_a_generated_token_is_refused():
    for prompt in (1, 5):
        with pytest.raises(ValueError, match="no generated token"):
            collate([text(1, prompt=prompt)], device=CPU)
