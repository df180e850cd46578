"""The operator's page: its numbers are those of buffer, registry and gate, and no text is in it."""

import re
import warnings
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from draftkit.config import BufferConfig
from draftkit.evaluation.intervals import Estimate
from draftkit.online import registry as registry_module
from draftkit.online.buffer import Buffer, Served
from draftkit.online.daemon import Daemon
from draftkit.online.gate import Verdict
from draftkit.online.page import EVERY_SECONDS, SHOWN, ServicePage
from draftkit.online.push import PUSHED
from draftkit.online.registry import Registry
from tests.online import making
from tests.online.drafters import weights
from tests.online.shop import SETTINGS, Shop, entries
from tests.online.test_taken_back import published
from tests.online.traffic import DAY, MARK, Clock, entry

GAIN = Estimate(0.031, 0.012, 0.05, 900, 40, 40)
PASSED = Verdict(True, "alpha rose", GAIN, GAIN, GAIN, None, 0.001).as_dict()
REFUSED = PASSED | {"reason": "no sure gain"}


class Service:
    """Buffer and registries of some routes, and the state that their refits would have."""

    def __init__(self, folder: Path, clock: Clock, *routes: str) -> None:
        self.clock = clock
        self.buffer = Buffer(folder / "b.sqlite", BufferConfig(), clock=self.clock)
        self.refits: list[Any] = []
        for route in routes:
            state = {"update": 0, "chosen": {}, "alphas": {}, "decisions": []}
            made = {"route": route, "registry": Registry(folder, route), "state": state}
            known = {"judge": SimpleNamespace(measure="alpha"), "wanted": 64}
            counted = {"new_records": lambda: 41, "folder": folder / "refit" / route}
            self.refits.append(SimpleNamespace(**made, **known, **counted))
            self.refits[-1].registry.seed(weights(0))
        self.page = ServicePage("mine", folder, self.refits, self.buffer, clock=self.clock)

    def decide(self, verdict: dict[str, Any], *, route: int = 0) -> None:
        """An update that the gate lets through, or not."""
        refit, name = self.refits[route], None
        if verdict is not REFUSED:
            name = refit.registry.publish(weights(1), metrics=verdict).name
            refit.state["chosen"][name] = 1
        number = refit.state["update"]
        decision = {"time": self.clock(), "update": number, "base": "v000001", "version": name}
        refit.state["decisions"].append(decision | verdict)
        refit.state["update"] = number + 1


Make = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made, clock = list[Service](), Clock()
    monkeypatch.setattr(registry_module, "time", SimpleNamespace(time=clock))

    def service(*routes: str) -> Service:
        made.append(Service(tmp_path, clock, *routes or ("default",)))
        return made[-1]

    yield service
    for one in made:
        one.buffer.close()


def rows(text: str, section: str) -> list[list[str]]:
    """The cells of the table in the section of that title."""
    part = text.partition(f"<h2>{section}</h2>")[2].partition("</section>")[0]
    found = re.findall(r"<tr>(.*?)</tr>", part.partition("<tbody>")[2], re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in found]


SERVED, DECIDED = "What is served", "What was published, refused and taken back"
COUNTS = {"rounds": 100, "drafted": 400, "accepted": 137, "tested": 200, "acceptance": 130.4}


def test_its_numbers_are_those_of_buffer_registry_and_gate(make: Make) -> None:
    service = make()
    service.buffer.add_served([Served(route="default", version="v000001", requests=7, **COUNTS)])
    service.buffer.append([entry(number, tokens=50) for number in range(3)])
    service.clock.pass_time(DAY)
    service.decide(PASSED)
    service.decide(REFUSED)
    later = GAIN.as_dict()
    service.refits[0].state["alphas"]["v000002"] = later
    more = COUNTS | {"accepted": 163}
    service.buffer.add_served([Served(route="default", version="v000002", requests=2100, **more)])
    service.buffer.append([entry(number, tokens=50) for number in range(3, 8)])
    text = service.page.text()
    assert '<p class="verdict good">1 published, 1 refused, 0 taken back</p>' in text
    assert "v000002 in force, alpha 0.652, 2,100 answers. 41 of 64 new records" in text
    assert '<span class="number">2.63</span>' in text
    gain, since = "+0.031 [+0.012, +0.050]", ("2001-09-10 01:46", "2001-09-09 01:46")
    measured = ["2,100", "4.00", "2.63", "0.652", gain, "0.031 [0.012, 0.050]", since[0]]
    assert rows(text, SERVED) == [
        ["default", "v000002 *", *measured],
        ["default", "v000001", "7", "4.00", "2.37", "0.652", "-", "-", since[1]],
    ]
    assert sorted(rows(text, DECIDED)) == [
        [since[0], "default", "published v000002", gain, "0", "alpha rose"],
        [since[0], "default", "refused", gain, "1", "no sure gain"],
    ]
    sizes = [f"{size / 1e6:.2f}" for _, _, _, size in service.buffer.days()]
    assert rows(text, "Records by day") == [
        ["2001-09-10", "5", sizes[1]],
        ["2001-09-09", "3", sizes[0]],
    ]
    assert "8 records" in text
    assert text.count("<svg ") == 3
    assert f">{str(MARK)[:6]}" not in text
    assert "document" not in text
    assert not re.search(r"<script|https?://|<link|@import", text)


def test_of_a_service_that_has_served_nothing_it_says_so(make: Make) -> None:
    service = make()
    text = service.page.text()
    assert '<p class="verdict open">No update yet</p>' in text
    assert "no acceptance is known by time yet." in text
    assert "per-request" not in text
    assert "<svg " not in text
    assert rows(text, DECIDED) == rows(text, "Records by day") == []
    assert rows(text, SERVED)[0][:4] == ["default", "v000001 *", "-", "-"]


def test_every_route_has_its_own_numbers(make: Make) -> None:
    service = make("default", "code")
    service.decide(PASSED, route=1)
    service.buffer.add_served([Served(route="code", version="v000002", requests=5, **COUNTS)])
    service.buffer.append([entry(1, "code"), entry(2, "gone"), entry(3), entry(4, "code")])
    (service.page.folder / PUSHED / "code").mkdir(parents=True)
    text = service.page.text()
    assert [row[:5] for row in rows(text, SERVED)] == [
        ["default", "v000001 *", "-", "-", "-"],
        ["code", "v000002 *", "5", "4.00", "2.37"],
        ["code", "v000001", "-", "-", "-"],
    ]
    assert [row[1:4] for row in rows(text, "Records by day")] == [["1", "2", "1"]]
    assert [row[0] for row in rows(text, "Disk")] == [
        "traffic",
        *("versions of default: 1", "trainer of default", "versions of code: 2"),
        *("for the engine of code", "trainer of code"),
        *("all of these", "free on this disk"),
    ]


def test_what_an_engine_serves_is_counted_since_the_version_came_into_force(make: Make) -> None:
    service = make()
    silent = Served(route="default", version="engine", requests=9)
    service.buffer.add_served([silent])
    assert "vLLM does with --per-request-spec-decode-metrics" in service.page.text()
    service.buffer.add_served([Served(route="default", version="engine", requests=30, **COUNTS)])
    service.clock.pass_time(600)
    service.decide(PASSED)
    service.clock.pass_time(60)
    new = COUNTS | {"accepted": 163}
    service.buffer.add_served([Served(route="default", version="engine", requests=4, **new)])
    text = service.page.text()
    assert "v000002 in force, alpha 0.652, 4 answers" in text
    assert '<span class="number">2.63</span>' in text
    assert rows(text, SERVED)[-1][1:5] == ["engine", "43", "4.00", "2.50"]


@pytest.mark.parametrize("minutes", [150, 3600])
def test_a_stretch_between_two_units_of_time_has_ticks_too(make: Make, minutes: int) -> None:
    """With the margins 165 minutes and 66 hours: matplotlib warned of both."""
    service = make()
    for _ in range(2):
        service.buffer.add_served([Served(route="default", version="v000001", **COUNTS)])
        service.clock.pass_time(60 * minutes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "<svg " in service.page.text()


def test_a_reason_is_no_markup(make: Make) -> None:
    service, evil = make(), "<script>alert(1)</script> & \"'"
    service.decide(PASSED | {"reason": evil})
    service.clock.pass_time(60)
    service.refits[0].registry.rollback(reason=evil)
    text = service.page.text()
    assert "<script" not in text
    assert '<p class="verdict bad">1 published, 0 refused, 1 taken back</p>' in text
    back, up = rows(text, DECIDED)
    assert back[2:] == ["v000002 taken back to v000001", "-", "-", evil]
    assert up[-1] == evil


def test_of_many_versions_and_decisions_the_newest_are_shown(make: Make) -> None:
    service = make()
    for number in range(SHOWN + 5):
        served = Served(route="default", version=f"v{number + 1:06d}", requests=number, **COUNTS)
        service.buffer.add_served([served])
        service.clock.pass_time(600)
        service.decide(REFUSED if number % 2 else PASSED)
    text = service.page.text()
    versions = [row[1].rstrip(" *") for row in rows(text, SERVED)]
    assert versions == [f"v{number:06d}" for number in range(SHOWN + 5, 5, -1)]
    assert [row[4] for row in rows(text, DECIDED)] == [
        str(number) for number in range(SHOWN + 4, 4, -1)
    ]


def test_it_is_written_where_something_is_new_and_for_its_owner_alone(make: Make) -> None:
    service, writes = make(), []
    service.page.text = lambda: writes.append(1) or f"page {len(writes)}"  # type: ignore
    path = service.page.folder / "report.html"
    news: list[Callable[[], object]] = [
        lambda: service.decide(PASSED),
        lambda: service.decide(REFUSED),
        lambda: service.refits[0].registry.rollback(reason="by command"),
        lambda: service.clock.pass_time(EVERY_SECONDS),
    ]
    for count, happen in enumerate([lambda: None, *news], 1):
        happen()
        for _ in range(2):
            service.page.refresh()
            assert path.read_text() == f"page {count}"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_goes_wrong_is_logged_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    service = make()
    service.buffer.close()
    for _ in range(2):
        service.page.refresh()
    (record,) = caplog.records
    assert "report.html is not written" in record.getMessage()


def run(shop: Shop, folder: Path, updates: int | None) -> str:
    """The page that a daemon leaves which ends after so many updates, or at its first wait."""
    page = ServicePage("mine", folder, [shop.refit], shop.buffer)
    stop = Event()
    stop.wait = lambda timeout=None: bool(stop.set())  # type: ignore[method-assign]
    settings = SimpleNamespace(most_updates=updates, poll_seconds=1.0)
    options: Any = {"settings": settings, "log": lambda *_: None, "show": page.refresh}
    Daemon([shop.refit], shop.buffer, stop=stop, **options).run()
    return (folder / "report.html").read_text()


def test_a_daemon_writes_it_after_an_update_and_knows_the_decision_after_a_restart(
    tmp_path: Path,
) -> None:
    shop = Shop(tmp_path, making.traffic(60))
    text = run(shop, tmp_path, 1)
    version = shop.registry.version("v000002")
    (row,) = rows(text, DECIDED)
    assert row[2:] == [
        "published v000002",
        rows(text, SERVED)[0][6],
        "0",
        version.metrics["reason"],
    ]
    shop.buffer.close()
    again = Shop(tmp_path)
    assert rows(run(again, tmp_path, None), DECIDED) == [row]
    again.buffer.close()


def test_a_daemon_writes_it_after_it_has_taken_a_version_back(tmp_path: Path) -> None:
    records = making.traffic(80)
    shop = Shop(tmp_path, records[:20], min_records=SETTINGS.min_records)
    published(shop, 0.5)
    assert shop.refit.review() is None
    shop.buffer.append(entries(records[20:]))
    shop.refit.due = lambda: False  # type: ignore[method-assign]
    text = run(shop, tmp_path, None)
    (row,) = rows(text, DECIDED)
    assert row[2] == "v000002 taken back to v000001"
    assert row[-1] == shop.registry.changes()[-1]["reason"]
    assert "look" in row[-1]
    shop.buffer.close()
