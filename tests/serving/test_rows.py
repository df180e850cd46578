"""What a round brings reaches counts and listeners, each thing once."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftkit.config import BufferConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.streaming import Decode
from draftkit.online.registry import Registry
from draftkit.serving.answers import Answer
from draftkit.serving.drafters import START, Drafters
from draftkit.serving.jobs import Job
from draftkit.serving.recorder import Recorder
from draftkit.serving.rows import Rows
from tests import tiny
from tests.serving.running import GREEDY, Client, Disk, bytes_text, job, publish, route_of

TARGET, DRAFT = tiny.pair()
PROMPT = tiny.prompts([6])[0]


class Stand:
    """Rows without an engine."""

    def __init__(self, registry: Registry | None = None, decode: Decode = bytes_text) -> None:
        self.decode = decode
        self.drafters = Drafters([route_of("default", lambda: copy.deepcopy(DRAFT), registry)])
        self.decoder = Decoder(TARGET, slots=3, capacity=96)
        self.drafters.attach(self.decoder)
        self.rows = Rows(self.decoder, Recorder(Disk(), BufferConfig()), gamma=3)

    def join(self, one: Job) -> tuple[Client, Answer]:
        client = Client(one)
        answer = Answer(one, client, decode=self.decode, seed=1)
        self.rows.join(answer)
        return client, answer

    def finish(self) -> None:
        while len(self.rows):
            self.rows.round()


def test_an_answer_of_two_versions_is_counted_for_both(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    stand = Stand(registry)
    stand.join(job(PROMPT, 40))
    stand.rows.round()
    publish(registry, TARGET.weights())
    stand.drafters.poll()
    stand.finish()
    keys = {version for _, version in stand.rows.counters().drafters}
    assert keys == {START, "v000001"}


def test_rows_share_the_time_of_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("draftkit.serving.rows.time", clock)
    stand = Stand()
    stand.join(job(PROMPT, 9, sampling=GREEDY))
    stand.join(job(PROMPT, 9, sampling=GREEDY))
    stand.rows.round()
    (tally,) = stand.rows.counters().drafters.values()
    assert tally.seconds == 1.0
    assert tally.rounds == 2


def test_counts_that_were_handed_out_stay_as_they_were() -> None:
    stand = Stand()
    stand.join(job(PROMPT, 9, sampling=GREEDY))
    stand.finish()
    before = stand.rows.counters()
    kept = copy.deepcopy(before)
    stand.join(job(PROMPT, 5, sampling=GREEDY))
    stand.finish()
    assert before == kept
    assert (before.generated_tokens, stand.rows.counters().generated_tokens) == (9, 14)


def test_counts_of_tokens_never_fall_and_end_as_what_was_told() -> None:
    """A stop string of twelve tokens takes back those of several rounds of at most four."""

    def triples(ids: list[int]) -> str:
        return "".join(f"{token:03x}" for token in ids)

    def run(*stops: str) -> tuple[Client, list[int]]:
        stand = Stand(decode=triples)
        client, _ = stand.join(job(PROMPT, 30, seed=3, stops=stops))
        counts = [0]
        while len(stand.rows):
            stand.rows.round()
            drafters = stand.rows.counters().drafters.values()
            counts.append(sum(tally.tokens for tally in drafters))
        return client, counts

    whole, counts = run()
    assert counts[-1] == len(whole.ids) == 30
    client, counts = run(whole.text[15:51])
    assert client.text == whole.text[:15]
    assert counts == sorted(counts)
    assert counts[-1] == len(client.ids) == 5


def test_an_answer_that_ended_before_its_round_failed_ends_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand()
    done, _ = stand.join(job(PROMPT, 1))
    other, _ = stand.join(job(PROMPT, 9))
    leave = stand.rows._leave

    def failing(slots: Any) -> None:
        monkeypatch.setattr(stand.rows, "_leave", leave)
        raise RuntimeError("between the end of an answer and its leaving")

    monkeypatch.setattr(stand.rows, "_leave", failing)
    stand.rows.round()
    assert (done.reason, other.reason) == ("length", "error")
    assert len(stand.rows) == 0
    assert stand.decoder.free_slots == 3
    assert stand.rows.errors_in_a_row == 1
    client, _ = stand.join(job(PROMPT, 4))
    stand.finish()
    assert client.reason == "length"
    assert stand.rows.errors_in_a_row == 0


def test_an_answer_that_cannot_join_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand()
    good, _ = stand.join(job(PROMPT, 5))
    bad, _ = stand.join(job(PROMPT, 500))
    assert bad.reason == "error"
    stand.finish()
    assert good.reason == "length"
