"""Which records an update learns from, how many of each kind, and as what."""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch

from draftkit.online.rows import chosen, kinds, row_of, with_scores
from tests.online import making
from tests.online.shop import SETTINGS, Shop, entries


@pytest.fixture(scope="module")
def records():
    return making.traffic(120)


def test_a_record_without_verdicts_counts_whole_where_rejected_tokens_do(records):
    text = row_of(records[0], prompts=False)
    assert text.rejected == text.generated
    known = row_of(making.refused(records[0], [2]), prompts=False)
    given = len(records[0].prompt_ids)
    assert [place for place, no in enumerate(known.rejected) if no] == [given + 2]


def test_a_prompt_was_never_proposed_so_never_refused(records):
    text = row_of(making.refused(records[0], [2]), prompts=True)
    given = len(records[0].prompt_ids)
    assert [place for place, no in enumerate(text.rejected) if no] == [given + 2]


def test_with_stored_scores_only_records_of_the_same_temperature_are_used(tmp_path, records):
    """As a server records them: the mass outside at the served temperature alone."""
    served = [dataclasses.replace(record, loss_tail_mass=None) for record in records]
    others = [
        dataclasses.replace(record, sampling={**record.sampling, "temperature": 0.5})
        for record in served[60:]
    ]
    shop = Shop(tmp_path)
    shop.refit.stored_at = 1.0
    shop.buffer.append(entries(others))
    assert shop.refit.due()
    with pytest.raises(ValueError, match=r"online\.teacher=target"):
        shop.refit.update()
    shop.buffer.append(entries(served[:60]))
    shop.refit._restore()
    stored = shop.buffer.newest("default", 999, held_out=False)
    usable = shop.refit._learnable(stored)
    assert 2 < len(usable) < len(stored)
    assert shop.refit.update().version == "v000002"


def test_records_with_another_number_of_stored_ids_are_not_mixed(tmp_path, records):
    """They do not fit into one batch; the judge scores each by itself, so it takes all."""
    narrow = [
        dataclasses.replace(
            record,
            topk_ids=[ids[:3] for ids in record.topk_ids],
            topk_log_probs=[row[:3] for row in record.topk_log_probs],
        )
        for record in records[:60]
    ]
    shop = Shop(tmp_path)
    shop.refit.stored_at = 1.0
    shop.buffer.append(entries([*narrow, *records[60:]]))
    assert shop.refit.update().tokens > 0
    assert len(with_scores(narrow, temperature=1.0, width=making.TOP_K)) == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.5])
def test_the_kinds_fill_a_step_of_any_size(share):
    settings = dataclasses.replace(SETTINGS, anchor_fraction=share)
    for size, older, anchors in itertools.product(range(1, 13), (False, True), (False, True)):
        counts = kinds(size, settings, has_older=older, has_anchors=anchors)
        assert sum(counts) == size
        assert min(counts) >= 0
        assert counts[1] == 0 or older
        assert counts[2] == 0 or anchors


def test_rows_repeat_only_where_there_are_too_few():
    generator = torch.Generator().manual_seed(0)
    assert sorted(chosen(5, 5, generator)) == [0, 1, 2, 3, 4]
    assert Counter(chosen(3, 7, generator)).most_common()[-1][1] == 2
    assert chosen(0, 0, generator) == []
