"""Prompts of every form become what the target reads; cutting keeps the marks of the answer."""

import pytest

from draftkit.config import DataConfig, HardwareConfig, TargetConfig
from draftkit.data.lengths import Room
from draftkit.models.loading import load_target, save_model
from draftkit.prompts import examples_of, fit_examples
from tests import tiny
from tests.templates import CHAT, chat

PLAIN = DataConfig(prompt_tokens=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_model(tiny.model(), tiny.byte_tokenizer(), folder / "model")
    return load_target(TargetConfig(path=str(folder / "model")), HardwareConfig(device="cpu"))


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    tokenizer, folder = tiny.byte_tokenizer(), tmp_path_factory.mktemp("talking")
    tokenizer.chat_template = CHAT.replace("<|im_end|>", tiny.END)
    save_model(tiny.model(), tokenizer, folder / "model")
    return load_target(TargetConfig(path=str(folder / "model")), HardwareConfig(device="cpu"))


def read(prompts, target, data=PLAIN, **options):
    return examples_of(prompts, target, data, context=tiny.MAX_POSITIONS, **options)


def test_a_row_keeps_prompt_and_answer_apart(target):
    ids = target.tokenizer("ab").input_ids
    text, numbers, row = read(["ab", ids, {"prompt": "ab", "completion": "cd"}], target)
    assert text.prompt_ids == numbers.prompt_ids == row.prompt_ids == ids
    assert not numbers.has_completion
    assert row.has_completion
    assert len(row.token_ids) > len(ids)


def test_text_is_a_user_turn_where_there_is_a_template(talking):
    turns, lines = chat("ab", "cd"), []
    expected = talking.tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)
    text, row, first, naming = read(
        ["ab", {"prompt": "ab", "completion": "cd"}, turns, "ab<|end|>"],
        talking,
        note=lines.append,
    )
    for example in (text, row, first):
        assert example.prompt_ids == expected["input_ids"]
    assert row.token_ids == first.token_ids
    assert naming.prompt_ids[-1] == expected["input_ids"][-1]
    assert naming.prompt_ids.count(talking.tokenizer.eos_token_id) == 1
    assert [line.split()[0] for line in lines] == ["3", "1"]
    assert text.document == row.document == "prompt 0"
    never = DataConfig(chat_template="never")
    (plain,) = read(["ab"], talking, never)
    assert plain.prompt_ids == talking.tokenizer("ab").input_ids


def test_a_prompt_longer_than_the_context_is_named(target):
    for long in ("a" * 128, [7] * 128):
        with pytest.raises(ValueError, match=r"^prompt 1 has 128 tokens, .* context is 128: short"):
            read(["ab", long], target)
    assert len(read(["a" * 127], target)[0].prompt_ids) == 127


def test_what_is_cut_loses_the_end_of_its_answer_alone(target):
    (row,) = read([{"prompt": "ab", "completion": "cdefgh"}], target)
    ((cut,), room) = fit_examples([row], PLAIN, context=128, max_length=4)
    assert room == Room(4, 4)
    assert cut.token_ids == row.token_ids[:4]
    assert cut.loss_mask == row.loss_mask[:4]
    assert cut.prompt_ids == row.prompt_ids
    with pytest.raises(ValueError, match="max_length=2: raise it, or leave the prompt out"):
        fit_examples([row], PLAIN, context=128, max_length=2)


def test_without_a_length_those_of_the_data_hold(target):
    (row,) = read([{"prompt": "ab", "completion": "cdefgh"}], target)
    few = DataConfig(max_prompt_tokens=2, max_completion_tokens=3)
    ((cut,), room) = fit_examples([row], few, context=128, max_length=None)
    assert room == Room(3, 5)
    assert cut.token_ids == row.token_ids[:5]
    few = DataConfig(max_prompt_tokens=1)
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens=1: raise it, or leave the prom"):
        fit_examples([row], few, context=128, max_length=None)


def test_a_row_that_cannot_be_used_is_left_out_and_named(talking):
    rows, lines = [chat(f"say {n}", "so") for n in range(200)], []
    bad = {"messages": [{"role": "bard of all", "content": "a"}]}
    read_rows = read([*rows[:9], bad, *rows[9:]], talking, note=lines.append)
    assert [one.document for one in read_rows[8:10]] == ["prompt 8", "prompt 10"]
    assert [one.token_ids for one in read_rows] == [one.token_ids for one in read(rows, talking)]
    assert lines[-1].startswith("left out: prompt 9: messages[0] must have a role")
    with pytest.raises(
        ValueError, match=r"^prompt 1: .*; so 1 of 3 rows cannot be used, more than "
    ):
        read([rows[0], bad, rows[1]], talking)
    with pytest.raises(ValueError, match=r"^prompt 0: messages\[0\] must have a role[^;]*$"):
        read([bad], talking)
