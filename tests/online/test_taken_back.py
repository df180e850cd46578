"""A version that is taken back while an update goes on from it stays taken back."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from draftkit.config import OnlineConfig
from draftkit.online.daemon import Daemon
from draftkit.online.registry import Registry
from tests.online import making
from tests.online.drafters import chain, happened, name_of, publish
from tests.online.shop import Shop, entries


@pytest.fixture
def shop(tmp_path: Path):
    made = Shop(tmp_path)
    records = making.traffic(110)
    made.buffer.append(entries(records[:80]))
    assert made.refit.update().version == "v000002"
    made.buffer.append(entries(records[80:]))
    yield made
    made.buffer.close()


class Rollback:
    """Called before every step: in the middle of the first update it takes v000002 back."""

    def __init__(self, shop: Shop) -> None:
        self.registry, self.steps = shop.registry, 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            self.registry.rollback(reason="by command")


def test_a_rollback_during_an_update_stands_and_the_next_one_starts_from_it(shop: Shop) -> None:
    with pytest.raises(ValueError, match="it was made of v000002, and v000001 is in force now"):
        shop.refit.update(Rollback(shop))
    assert name_of(shop.registry.current()) == "v000001"
    assert [version.name for version in shop.registry.versions()] == ["v000001", "v000002"]
    assert shop.refit.due()  # it has learned nothing from these records
    assert shop.refit._trainer is not None
    assert shop.refit.state["base"] == "v000001"
    started, first = shop.refit._trainer.draft.weights(), shop.weights()
    assert all(bool((started[name] == first[name]).all()) for name in first)
    shop.refit.update()
    after = shop.registry.current()
    assert after is not None
    assert "v000002" not in after.ancestors


def test_the_daemon_says_so_in_one_line_and_goes_on_at_once(shop: Shop, caplog) -> None:
    class Busy:
        """A buffer that is asked before every step; it tells of no load."""

        load = Rollback(shop)

        def maintain(self) -> None:
            pass

    waits: list[float] = []
    stop: Any = Event()
    stop.wait = waits.append
    Daemon(
        [shop.refit],
        buffer=Busy(),  # type: ignore[arg-type]
        settings=OnlineConfig(most_updates=1),
        log=lambda *_: None,
        stop=stop,
    ).run()
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == (
        "route default: nothing is published: it was made of v000002, and v000001 is in force now"
    )
    assert sum(waits) <= 2 * OnlineConfig().poll_seconds
    assert name_of(shop.registry.current()) != "v000002"


def test_what_a_version_was_made_of_must_still_be_in_force(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    chain(registry, 3)
    registry.rollback(reason="it fell")
    events = happened(registry)
    for gone in ("v000003", "v000001"):
        with pytest.raises(ValueError, match=f"made of {gone}, and v000002 is in force now"):
            publish(registry, 9, parent=gone)
    assert happened(registry) == events
    assert name_of(registry.current()) == "v000002"
    tried = publish(registry, 4, parent="v000002", canary=True)
    assert publish(registry, 5, parent=tried.name, canary=True).parent == tried.name
    registry.withdraw("v000005", reason="no better")
    with pytest.raises(ValueError, match="made of v000005, and v000002 is in force now"):
        publish(registry, 6, parent="v000005")
    registry.promote(publish(registry, 7, parent="v000002", canary=True).name)
    assert publish(registry, 8, parent="v000006").ancestors[:2] == ("v000006", "v000002")
