"""A version goes where it serves worse than the one before it; one that was taken back stays so."""

import dataclasses
import math
from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from draftkit.models.loading import save_model
from draftkit.online.registry import NotInForce, Registry
from tests import tiny
from tests.online import making
from tests.online.drafters import chain, name_of
from tests.online.shop import Shop, entries, start


def test_a_rollback_during_an_update_stands_and_the_next_one_starts_from_it(tmp_path: Path) -> None:
    shop, records, steps = Shop(tmp_path), making.traffic(110), []
    shop.buffer.append(entries(records[:80]))
    assert shop.refit.update().version == "v000002"
    shop.buffer.append(entries(records[80:]))

    def hold() -> None:
        steps.append(1)
        if len(steps) == 3:
            shop.registry.rollback(reason="by command")

    with pytest.raises(NotInForce, match="it was made of v000002, and v000001 is in force now"):
        shop.refit.update(hold)
    assert name_of(shop.registry.current()) == "v000001"
    assert shop.registry.names() == ["v000001", "v000002"]
    assert shop.refit.due()  # it has learned nothing from these records
    assert shop.refit._trainer is not None
    assert shop.refit.state["base"] == "v000001"
    assert shop.refit._trainer.steps == shop.settings.steps  # they go on being counted
    started, first = shop.refit._trainer.draft.weights(), shop.weights()
    assert all(bool((started[name] == first[name]).all()) for name in first)
    shop.refit.update()
    after = shop.registry.current()
    assert after is not None
    assert "v000002" not in after.ancestors
    shop.buffer.close()


def less_sure(record):
    """The record of a target that is far less sure, so that every draft is accepted less."""
    assert record.topk_log_probs is not None
    lower = [[value - math.log(4) for value in row] for row in record.topk_log_probs]
    tails = [1 - sum(map(math.exp, row)) for row in lower]
    return dataclasses.replace(record, topk_log_probs=lower, tail_mass=tails)


def published(shop: Shop, sureness: float) -> str:
    """A version that no gate has seen: the starting drafter, more or less sure than it was."""
    draft = start()
    draft.model.model.norm.weight.data.mul_(sureness)
    version = shop.registry.publish(
        lambda path: save_model(draft.model, tiny.byte_tokenizer(), path), metrics={}
    )
    return version.name


def test_a_drift_of_the_traffic_takes_nothing_back(tmp_path: Path) -> None:
    """Although every version is accepted less after it than the one before was before it."""
    shop, records = Shop(tmp_path), making.traffic(140)
    shop.buffer.append(entries(records[:60]))
    first, anew = shop.weights(), [less_sure(record) for record in records[60:]]
    assert shop.refit.update().version == "v000002"
    shop.buffer.append(entries(anew))
    score = shop.refit.judge.score
    assert score(shop.weights(), anew).alpha.high < score(first, records[:60]).alpha.low
    assert shop.refit.review() is None
    assert name_of(shop.registry.current()) == "v000002"
    assert shop.refit.state["looks"] == {"v000002": 2}  # it was looked at
    shop.buffer.close()


@pytest.mark.parametrize("drifts", [False, True])
def test_a_version_that_serves_worse_is_taken_back(tmp_path: Path, drifts: bool) -> None:
    shop, records = Shop(tmp_path), making.traffic(140)
    shop.buffer.append(entries(records[:60]))
    first, worse = shop.weights(), published(shop, 0.5)
    assert shop.refit.review() is None  # nothing is served by it yet
    anew = [less_sure(record) for record in records[60:]] if drifts else records[60:]
    shop.buffer.append(entries(anew))
    reason = shop.refit.review()
    assert reason is not None
    assert name_of(shop.registry.current()) == "v000001"
    assert read_json(shop.registry.path / "current")["reason"] == reason
    assert shop.refit.wanted == 2 * shop.settings.min_records
    assert shop.refit.review() is None  # the starting drafter has none before it
    started = shop.refit._restore()[0].draft.weights()
    assert all(bool((started[name] == first[name]).all()) for name in first)
    assert worse == "v000002"
    shop.buffer.close()


def test_one_that_is_as_good_stays_and_looks_are_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, records = Shop(tmp_path), making.traffic(140)
    published(shop, 1.0)
    assert shop.refit.review() is None
    scored: list[int] = []
    score = shop.refit.judge.score
    monkeypatch.setattr(
        shop.refit.judge, "score", lambda *what: scored.append(len(what[1])) or score(*what)
    )
    for first in range(0, 140, 4):
        shop.buffer.append(entries(records[first : first + 4]))
        assert shop.refit.review() is None
    assert name_of(shop.registry.current()) == "v000002"
    assert 2 <= len(scored) <= 6  # two models at 32 and 64 records, and at 16 where they suffice
    looks = shop.refit.state["looks"]
    shop.buffer.close()
    again = Shop(tmp_path)  # a restart does not spend the budget of false alarms once more
    monkeypatch.setattr(again.refit.judge, "score", lambda *_: pytest.fail("it looked again"))
    assert again.refit.review() is None
    assert again.refit.state["looks"] == looks
    again.buffer.close()


def test_a_rollback_by_hand_is_not_undone(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    chain(registry, 3)
    registry.rollback(reason="by command")
    with pytest.raises(NotInForce, match="v000003 is not taken back: v000002 is in force now"):
        registry.rollback("v000001", reason="worse", current="v000003")
    assert name_of(registry.current()) == "v000002"
