"""Ages go by uptime; a jump of the wall clock makes nothing older until it has proved itself."""

from draftkit.online.ages import (
    PROOF_SECONDS,
    SMALL_SECONDS,
    Ledger,
    Uptime,
    look,
    seconds_since,
    uptime,
)
from tests.online.traffic import DAY, Clocks

YEARS = 1000 * DAY


def looked(clocks: Clocks, ledger: Ledger | None) -> Ledger:
    return look(ledger, wall=clocks.wall, up=clocks.uptime())


def test_the_ledger_follows_a_clock_that_is_right() -> None:
    clocks = Clocks()
    ledger = looked(clocks, None)
    for seconds in (1, 3600, 40 * DAY):
        clocks.pass_time(seconds)
        ledger = looked(clocks, ledger)
        assert ledger.now == clocks.wall


def test_a_jump_forward_counts_only_after_it_has_lasted() -> None:
    clocks = Clocks()
    ledger = looked(clocks, None)
    clocks.wall += YEARS
    for _ in range(10):
        ledger = looked(clocks, ledger)
        assert ledger.now < clocks.wall - YEARS + 1 + PROOF_SECONDS
        clocks.pass_time(PROOF_SECONDS / 10)
    assert looked(clocks, ledger).now == clocks.wall


def test_a_jump_that_is_put_right_leaves_no_trace() -> None:
    clocks = Clocks()
    ledger = looked(clocks, None)
    for _ in range(3):  # each shorter than the proof, together longer
        clocks.wall += YEARS
        ledger = looked(clocks, ledger)
        clocks.pass_time(PROOF_SECONDS / 2)
        ledger = looked(clocks, ledger)
        clocks.wall -= YEARS
        ledger = looked(clocks, ledger)
        assert ledger.now == clocks.wall


def test_a_jump_back_makes_nothing_younger_and_time_goes_on() -> None:
    clocks = Clocks()
    ledger = looked(clocks, None)
    begun = ledger.now
    clocks.wall -= YEARS
    clocks.pass_time(5 * DAY)
    assert looked(clocks, ledger).now == begun + 5 * DAY


def test_time_off_counts_a_day_late_and_a_short_one_at_once() -> None:
    clocks = Clocks()
    ledger = looked(clocks, None)
    clocks.reboot(SMALL_SECONDS)
    ledger = looked(clocks, ledger)
    assert ledger.now == clocks.wall
    clocks.reboot(60 * DAY)
    ledger = looked(clocks, ledger)
    assert ledger.now == clocks.wall - 60 * DAY
    clocks.pass_time(PROOF_SECONDS)
    assert looked(clocks, ledger).now == clocks.wall


def test_uptime_is_of_this_boot_and_runs() -> None:
    first, second = uptime(), uptime()
    passed = seconds_since(first, second)
    assert passed is not None
    assert 0 <= passed < 60
    assert seconds_since(first, Uptime(boot="another", seconds=second.seconds)) is None
    assert seconds_since(second, Uptime(boot=first.boot, seconds=0.0)) == 0
