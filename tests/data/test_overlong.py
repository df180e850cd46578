"""Rows longer than the context are cut or left out, as asked, and counted."""

import json

import pytest

from draftkit.config import DataConfig
from draftkit.data.corpora import read_documents
from draftkit.data.prompts import make_splits
from draftkit.models.vocabulary import train_byte_bpe

ROWS = [{"prompt": f"{n}", "completion": "the " * (1 + 90 * (n % 5 == 0))} for n in range(100)]


@pytest.mark.parametrize(
    ("overlong", "dropped", "cut"), [("drop", 20, 0), ("cut", 0, 20)], ids=["drop", "cut"]
)
def test_rows_that_are_too_long(tmp_path, overlong, dropped, cut):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = DataConfig(
        name="local", path=str(path), max_length=50, prompt_tokens=8, overlong=overlong
    )
    documents = list(read_documents(data))
    splits = make_splits(documents, data, train_byte_bpe(["of a b"], 300), tmp_path)
    assert (splits.counts["rows_dropped"], splits.counts["completions_cut"]) == (dropped, cut)
    examples = [*splits.train, *splits.validation, *splits.test]
    assert len(examples) == 100 - dropped
    assert max(len(example.token_ids) for example in examples) <= 50
