"""Which texts the target scores, and that what is stored are its own most likely ids."""

from dataclasses import replace

import pytest
import torch

from draftkit.config import SourceConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.workflow.sources import TrainingTexts, scored_by, texts_to_score
from tests import tiny
from tests.workflow.making import CONFIG

TEXT = Example([5, 6, 7, 8], [False, False, True, True], "a.txt", "prose")


def test_texts_of_the_data_are_scored_as_if_they_had_been_sampled() -> None:
    config = replace(CONFIG, source=SourceConfig(name="fixed"))
    (record,) = texts_to_score(config, TrainingTexts([TEXT], Room(9, 9)))
    assert (record.prompt_ids, record.output_ids) == ([5, 6], [7, 8])
    assert (record.document, record.domain, record.row) == ("a.txt", "prose", 0)


def test_texts_that_change_as_the_draft_learns_have_no_scores() -> None:
    config = replace(CONFIG, source=SourceConfig(name="draft"))
    with pytest.raises(ValueError, match=r"^generate\.top_k: source=draft .*generate\.top_k=0$"):
        texts_to_score(config, TrainingTexts([TEXT], Room(9, 9)))


def test_the_ids_of_every_token_are_the_targets_likeliest_there() -> None:
    target = tiny.adapter()
    config = replace(CONFIG, source=SourceConfig(name="fixed"))
    texts = [replace(TEXT, token_ids=[5, 6, 7 + n, 8]) for n in range(20)]  # more than one batch
    records = texts_to_score(config, TrainingTexts(texts, Room(9, 9)))
    scored = scored_by(target, records, top_k=3, temperature=1.0)
    assert [record.output_ids for record in scored] == [[7 + n, 8] for n in range(20)]
    with torch.no_grad():
        logits = target.model(torch.tensor([texts[18].token_ids])).logits[0, 1:3]
    assert scored[18].topk_ids == logits.topk(3).indices.tolist()
