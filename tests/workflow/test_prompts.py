"""Prompts of every form become what the target reads; cutting keeps the marks of the answer."""

import pytest

from draftkit.config import HardwareConfig, ModelConfig
from draftkit.models.loading import load_target, save_model
from draftkit.workflow.prompts import cut_examples, examples_of
from tests import tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_model(tiny.model(), tiny.byte_tokenizer(), folder / "model")
    return load_target(ModelConfig(path=str(folder / "model")), HardwareConfig(device="cpu"))


def test_a_row_keeps_prompt_and_answer_apart(target):
    ids = target.tokenizer("ab").input_ids
    text, numbers, row = examples_of(["ab", ids, {"prompt": "ab", "completion": "cd"}], target)
    assert text.prompt_ids == numbers.prompt_ids == row.prompt_ids == ids
    assert not numbers.has_completion
    assert row.has_completion
    assert len(row.token_ids) > len(ids)


def test_what_is_cut_loses_the_end_of_its_answer_alone(target):
    (row,) = examples_of([{"prompt": "ab", "completion": "cdefgh"}], target)
    length = len(row.prompt_ids) + 2
    (cut,) = cut_examples([row], length)
    assert cut.token_ids == row.token_ids[:length]
    assert cut.loss_mask == row.loss_mask[:length]
    assert cut.prompt_ids == row.prompt_ids
    with pytest.raises(ValueError, match="raise it, or leave the prompt out"):
        cut_examples([row], len(row.prompt_ids))
