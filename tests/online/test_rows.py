"""Which records an update learns from, how many of each kind, and as what."""

import dataclasses
import itertools
from collections import Counter

import pytest

from draftkit.config import Config, OnlineConfig, OptimConfig
from draftkit.online.refit import drawn, optim_of_update, row_of
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
    assert shop.refit._learnable(narrow) == []


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.5])
def test_the_kinds_fill_a_step_of_any_size(records, share):
    settings = dataclasses.replace(SETTINGS, anchor_fraction=share)
    for size, *there in itertools.product(range(1, 13), (False, True), (False, True)):
        older, anchors = records[1 : 1 + there[0]], records[2 : 2 + there[1]]
        rows = drawn((records[:1], older, anchors), size, settings, seed=0)
        texts = [row.token_ids for row in rows]
        counts = [texts.count(row_of(one, prompts=False).token_ids) for one in records[:3]]
        assert sum(counts) == len(texts) == size
        wanted = round(size * share) if there[1] else 0
        assert counts[2] == wanted
        assert counts[0] == min(round(size / 2), size - wanted) or not there[0]


def test_rows_repeat_only_where_there_are_too_few(records):
    def times(count, size):
        rows = drawn((records[:count], (), ()), size, SETTINGS, seed=0)
        return sorted(Counter(tuple(row.token_ids) for row in rows).values())

    assert times(5, 5) == [1] * 5
    assert times(3, 7) == [2, 2, 3]


def test_the_rate_falls_to_zero_in_every_update_without_a_warm_up() -> None:
    optim = OptimConfig(max_steps=900, warmup_steps=40, learning_rate=3e-4)
    config = Config(optim=optim, online=OnlineConfig(steps=17))
    expected = dataclasses.replace(optim, max_steps=17, warmup_steps=0, lr_scheduler_type="linear")
    assert optim_of_update(config) == expected
