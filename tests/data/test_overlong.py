"""Rows longer than the context are cut, chats by whole turns, and counted."""

import json

import pytest

from draftkit.config import DataConfig
from draftkit.data.corpora import read_documents
from draftkit.data.prompts import make_splits
from tests.templates import CHAT, byte_bpe, chat, headers
from tests.trained import train_byte_bpe


def splits_of(folder, rows, tokenizer=None, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(name="local", path=str(path), max_completion_tokens=50, **options)
    documents, tokenizer = list(read_documents(data)), tokenizer or train_byte_bpe(["of a b"], 300)
    return make_splits(documents, data, tokenizer, folder, context=512)


def test_nothing_left_names_the_lengths(tmp_path):
    rows = [{"messages": chat("of " * (300 + n))} for n in range(9)]
    message = r"no row of the train split is usable, all are longer than 100 tokens of prompt: rai"
    with pytest.raises(ValueError, match=message) as error:
        splits_of(tmp_path, rows, byte_bpe(template=CHAT), max_prompt_tokens=100)
    assert "\n" not in str(error.value)


def test_a_chat_loses_its_oldest_turns_and_is_dropped_where_the_last_is_too_long(tmp_path):
    tokenizer, system = headers(), {"role": "system", "content": "be brief"}
    long = [system, *chat("of " * 30, "yes", "and b?", "no " * 9)]
    rows = [chat(f"say {n}", "so") for n in range(60)] + [long, chat("x7 " * 300, "yes")]
    date = {"date_string": "1 May"}

    def prompt(*turns):
        return tokenizer.apply_chat_template([*turns], add_generation_prompt=True, **date)

    whole, kept = prompt(*long[:-1])["input_ids"], prompt(system, long[-2])["input_ids"]
    splits = splits_of(
        tmp_path,
        [{"messages": turns} for turns in rows],
        tokenizer,
        template_options=date,
        max_prompt_tokens=len(whole) - 1,
    )
    # The first turn alone fits, being shorter than both with the answer between them.
    assert (splits.counts["prompts_cut"], splits.counts["rows_dropped"]) == (1, 1)
    examples = [*splits.train, *splits.validation, *splits.test]
    assert len(examples) == 62
    (shortened,) = [one for one in examples if one.prompt_ids == kept]
    answer = tokenizer.decode(shortened.token_ids[len(shortened.prompt_ids) :])
    assert answer.startswith("no no")
    assert answer.endswith(tokenizer.eos_token)
