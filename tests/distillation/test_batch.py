"""What a batch knows of its rows, whole and in parts."""

import pytest
import torch

from draftkit.distillation.batch import TokenSequence, collate

CPU = torch.device("cpu")


def text(*ids, prompt=1, **facts):
    return TokenSequence(list(ids), [i >= prompt for i in range(len(ids))], **facts)


TEXTS = [text(1, 2, 3, 4, 5, prompt=2), text(6, 7)]


def test_padding_predicts_nothing_and_is_predicted_by_nothing():
    batch = collate(TEXTS[:2], device=CPU)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert batch.token_ids.tolist() == [3, 4, 5, 7]
    assert batch.predicting.tolist() == [[False, True, True, True, False], [True] + [False] * 4]


def test_a_text_that_claims_its_first_token_was_generated_predicts_it_from_nothing():
    batch = collate([text(1, 2), text(3, 4, prompt=0)], device=CPU)
    assert batch.token_ids.tolist() == [2, 4]


def test_micro_batches_carry_all_that_is_known_of_their_rows():
    rows = [
        text(1, 2, 3, rejected=[False, True, False], block_offset=[0, 0, 1]),
        text(4, 5, rejected=[False, True], block_offset=[0, 2]),
    ]
    whole = collate(rows, device=CPU)
    first, second = whole.micro_batches(2)
    assert second.input_ids.tolist() == [[4, 5]]
    assert second.rejected.tolist() == [[False, True]]
    assert second.block_offset.tolist() == [[0, 2]]
    assert first.generated(first.rejected).tolist() == [True, False]


def test_facts_that_some_row_lacks_are_left_out():
    rows = [text(1, 2, rejected=[False, True]), text(3, 4)]
    assert collate(rows, device=CPU).rejected is None


def test_a_batch_without_a_generated_token_is_refused():
    for prompt in (1, 5):
        with pytest.raises(ValueError, match="no generated token"):
            collate([text(1, prompt=prompt)], device=CPU)
