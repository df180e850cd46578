"""Rows longer than the context are cut or left out, as asked, and counted."""

import json

import pytest

from draftkit.config import DataConfig
from draftkit.data.corpora import read_documents
from draftkit.data.lengths import shares_cut
from draftkit.data.prompts import make_splits
from draftkit.models.vocabulary import train_byte_bpe

ROWS = [{"prompt": f"{n}", "completion": "the " * (1 + 90 * (n % 5 == 0))} for n in range(100)]


def splits_of(folder, rows, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(name="local", path=str(path), max_completion_tokens=50, **options)
    documents, tokenizer = list(read_documents(data)), train_byte_bpe(["of a b"], 300)
    return make_splits(documents, data, tokenizer, folder, context=512)


@pytest.mark.parametrize(
    ("overlong", "dropped", "cut"), [("drop", 20, 0), ("cut", 0, 20)], ids=["drop", "cut"]
)
def test_rows_that_are_too_long(tmp_path, overlong, dropped, cut):
    splits = splits_of(tmp_path, ROWS, overlong=overlong)
    assert (splits.counts["rows_dropped"], splits.counts["completions_cut"]) == (dropped, cut)
    assert shares_cut(splits.counts) == {
        "prompts_cut_share": 0,
        "completions_cut_share": cut / 100,
        "rows_dropped_share": dropped / 100,
    }
    examples = [*splits.train, *splits.validation, *splits.test]
    assert len(examples) == 100 - dropped
    assert max(sum(example.loss_mask) for example in examples) <= 50


def test_nothing_left_names_the_lengths(tmp_path):
    rows = [{"prompt": f"{n}", "completion": "the " * 90} for n in range(9)]
    message = r"no row of the train split is usable, all are longer than 462 tokens of prompt or 50"
    with pytest.raises(ValueError, match=message) as error:
        splits_of(tmp_path, rows, overlong="drop")
    assert "data.overlong=cut" in str(error.value)
    assert "\n" not in str(error.value)
