"""What is served is recorded as it was, without waiting, and only of those who did not opt out."""

import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from draftkit.config import BufferConfig, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.generation import TraceRound
from draftkit.online.buffer import Buffer
from draftkit.serving.answers import Answer, Counters
from draftkit.serving.drafters import START
from draftkit.serving.recorder import BATCH, Recorder, record_of
from tests import tiny
from tests.online.traffic import DAY, Clock, entries, stored
from tests.serving.running import (
    GREEDY,
    TARGET,
    answers,
    ask,
    bytes_text,
    job,
    serving,
    until,
)

PROMPTS = tiny.prompts([5, 17, 1, 9])
K = 24


def answered(number: int = 0, *, output_ids: Sequence[int] = (7, 9)) -> Answer:
    one = job([1, 2, number], conversation=f"talk {number}")
    made = Answer(one, lambda _: None, detokenize=bytes_text, seed=number)
    made.completion.output_ids += output_ids
    made.completion.steps = [TraceRound([7, 8], 1, 9, 2)]
    made.version = "v1"
    return made


def recorded(disk: Mock) -> list[Record]:
    """All that a stand-in for the buffer was given."""
    return [record for call in disk.append.call_args_list for _, record in call.args[0]]


def counted(disk: Mock, name: str) -> int:
    """The sum of all counts of that name."""
    rows = [row for call in disk.add_served.call_args_list for row in call.args[0]]
    return sum(getattr(row, name) for row in rows)


def check_record(record: Record, temperature: float) -> None:
    """The numbers of `record` are those of a fresh pass."""
    text = torch.tensor([record.prompt_ids + record.output_ids])
    with torch.no_grad():
        logits = TARGET.model(text).logits[0, len(record.prompt_ids) - 1 : -1].double()
    own = logits.log_softmax(-1).topk(K)
    assert np.array_equal(record.topk_ids, own.indices)
    found = torch.tensor(record.topk_log_probs, dtype=torch.float64)
    torch.testing.assert_close(found, own.values, atol=1e-4, rtol=0)
    tail = 1 - (logits / (temperature or 1)).softmax(-1).gather(1, own.indices).sum(-1)
    tails = torch.tensor(record.tail_mass, dtype=torch.float64)
    torch.testing.assert_close(tails, tail, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_record_tells_the_answer_and_how_it_came_about(temperature: float) -> None:
    disk = Mock(Buffer)
    sampling = SamplingConfig(temperature=temperature, top_p=0.95)
    with serving(disk=disk) as engine:
        jobs = [job(p, 9 + n, sampling=sampling, row=n) for n, p in enumerate(PROMPTS)]
        clients = answers(engine, *jobs)
        counters = engine.counters()
    records = recorded(disk)
    assert len(records) == 4
    by_row = {record.row: record for record in records}
    for number, client in enumerate(clients):
        record = by_row[number]
        assert record.prompt_ids == PROMPTS[number]
        assert record.output_ids == client.ids
        assert (record.sampler, record.sampler_version) == ("speculative", START)
        assert record.sampling["temperature"] == temperature
        assert record.sampling["top_p"] == 0.95
        check_record(record, temperature)
        assert record.proposals is not None
        assert record.rejected is not None
        refused = [
            (proposed, token)
            for proposed, token, gone in zip(
                record.proposals, record.output_ids, record.rejected, strict=True
            )
            if gone
        ]
        assert all(proposed != token for proposed, token in refused)
        kept = sum(
            p == t and not r
            for p, t, r in zip(record.proposals, record.output_ids, record.rejected, strict=True)
        )
        assert kept <= client.speculation.accepted
    assert len({record.seed for record in records}) == 4
    assert counted(disk, "tokens") == counters.generated_tokens
    disk.set_queued.assert_called_with(0)


def test_a_record_of_a_stopped_answer_ends_where_the_answer_does() -> None:
    disk = Mock(Buffer)
    sampling = SamplingConfig(temperature=2.0)

    def pairs(ids: list[int]) -> str:
        return "".join(f"{token:02x}" for token in ids if token < 256)

    with serving(disk=disk, detokenize=pairs) as engine:
        (whole,) = answers(engine, job(PROMPTS[1], 20, seed=1, sampling=sampling))
        stop = whole.text[9:14]
        (client,) = answers(
            engine, job(PROMPTS[1], 20, seed=1, sampling=sampling, stops=(stop,), row=0)
        )
    record = recorded(disk)[-1]
    assert record.output_ids == client.ids
    assert len(client.ids) < 20
    check_record(record, 2.0)


def test_a_broken_off_answer_is_not_recorded() -> None:
    disk = Mock(Buffer)
    with serving(disk=disk) as engine:
        (client,) = ask(engine, job(PROMPTS[0], 80))
        assert client.started.wait(30)
        engine.cancel([client.answer])
        client.wait()
    assert recorded(disk) == []
    assert counted(disk, "requests") == 1


def test_a_fraction_of_the_answers_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftkit.serving.recorder.QUEUE", 4000)
    for fraction, least, most in ((0.25, 850, 1150), (0.0, 0, 0)):
        recorder = Recorder(Mock(Buffer), BufferConfig(fraction=fraction))
        for number in range(4000):
            recorder.offer(answered(number))
        assert least <= recorder._queue.qsize() <= most


def test_records_are_written_together_and_what_finds_no_room_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftkit.serving.recorder.QUEUE", 100)
    disk = Mock(Buffer)
    is_free = threading.Event()
    disk.append.side_effect = lambda _: is_free.wait()
    recorder = Recorder(disk, BufferConfig(top_k=0))
    recorder.start(Counters)
    recorder.offer(answered(0))
    until(lambda: recorder._queue.empty())  # the thread waits for the disk with the first batch
    for number in range(1, 131):
        recorder.offer(answered(number))
    assert recorder.dropped == 30
    is_free.set()
    recorder.stop()
    assert [record.seed for record in recorded(disk)] == list(range(101))
    batches = [len(call.args[0]) for call in disk.append.call_args_list]
    assert max(batches) == BATCH
    assert len(batches) <= 3


def test_long_answers_find_less_room_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftkit.serving.recorder.QUEUE_NUMBERS", 100)
    recorder = Recorder(Mock(Buffer), BufferConfig(top_k=0))
    long = answered()  # three ids of its prompt, two of its own
    long.completion.topk_ids += [[*range(7)], []]  # and as many scores
    for _ in range(6):
        recorder.offer(long)
    assert (recorder.dropped, recorder._queue.qsize()) == (1, 5)
    recorder._write_batch()
    recorder.offer(long)
    assert (recorder.dropped, recorder._queue.qsize()) == (1, 1)


def test_a_disk_that_refuses_costs_records_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = Mock(Buffer)
    for write in (disk.append, disk.add_served, disk.set_queued, disk.maintain):
        write.side_effect = OSError(28, "No space left on device")
    with serving(disk=disk) as engine:
        clients = answers(engine, *[job(p, 8, sampling=GREEDY) for p in PROMPTS])
        assert {client.reason for client in clients} == {"length"}
        until(lambda: engine.counters().records_dropped == 4)
        first = engine.counters().generated_tokens
        disk.reset_mock(side_effect=True)
        answers(engine, job(PROMPTS[0], 8))
        until(lambda: len(recorded(disk)) == 1)
    assert caplog.text.count("No space left on device") == 1
    assert "can be written again" in caplog.text
    assert counted(disk, "tokens") == first + 8  # counts wait for the disk


def test_without_ids_a_record_has_none() -> None:
    disk = Mock(Buffer)
    with serving(disk=disk, buffer=BufferConfig(top_k=0)) as engine:
        answers(engine, job(PROMPTS[0], 8))
    (record,) = recorded(disk)
    assert record.topk_ids is None
    assert record.proposals is not None


def test_fewer_ids_than_clients_may_ask_for_are_refused_by_name() -> None:
    with (
        pytest.raises(ValueError, match=r"online.buffer.top_k must be 0 or at least 20, got 4"),
        serving(disk=Mock(Buffer), buffer=BufferConfig(top_k=4)),
    ):
        pass


def test_a_record_holds_what_was_proposed_in_the_place_of_each_token() -> None:
    found = record_of(answered(3), with_scores=False)
    assert found.proposals == [7, 8]
    assert found.rejected == [False, True]
    assert found.document == "talk 3"
    assert found.sampler_version == "v1"
    cut = record_of(answered(3, output_ids=[7]), with_scores=False)
    assert cut.proposals == [7]


def test_the_real_buffer_holds_what_was_served_and_no_trace_of_who_opted_out(
    tmp_path: Path,
) -> None:
    buffer = Buffer(tmp_path / "traffic.db", BufferConfig(top_k=K))
    secret, open_ = [251, 3, 199, 77, 12, 254, 90, 41], [33, 250, 7, 201, 66, 154, 9, 240]
    with serving(disk=buffer) as engine:
        answers(
            engine, job(secret, 9, records=False), job(open_, 9), job(open_, 4, route="default")
        )
        written = engine.counters().drafters["default", START]
        assert engine.counters().records_dropped == 0
    found = stored(buffer)
    assert [one.prompt_ids for one in found] == [open_] * 2
    check_record(next(one for one in found if len(one.output_ids) == 9), 1.0)
    (counts,) = buffer.served("default")
    assert (counts.requests, counts.tokens) == (written.requests, written.tokens) == (3, 22)
    with buffer._database.session() as connection:
        rows = connection.execute("SELECT content FROM records").fetchall()
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    files += b"".join(zlib.decompress(content) for (content,) in rows)
    buffer.close()
    for ids, is_there in ((open_, True), (secret, False)):
        forms = [np.array(ids, dtype=kind).tobytes() for kind in ("<i4", "<i8", "<u2", "u1")]
        forms += [", ".join(map(str, ids)).encode(), ",".join(map(str, ids)).encode()]
        assert any(form in files for form in forms) == is_there


def test_a_server_deletes_what_is_due_when_it_starts_and_while_it_idles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it records anything."""
    clock, monotonic = Clock(), time.monotonic
    watch = SimpleNamespace(monotonic=lambda: monotonic() + clock.seconds)
    monkeypatch.setattr("draftkit.serving.recorder.time", watch)
    settings = BufferConfig(retention_days=1, fraction=0.0)
    buffer = Buffer(tmp_path / "traffic.db", settings, clock=clock)
    buffer.append(entries(range(5)))
    clock.pass_time(0.6 * DAY)
    buffer.append(entries(range(5, 8)))
    clock.pass_time(0.6 * DAY)
    assert len(stored(buffer)) == 8
    recorder = Recorder(buffer, settings)
    recorder.start(Counters)
    until(lambda: len(stored(buffer)) == 3)
    clock.pass_time(0.6 * DAY)
    until(lambda: len(stored(buffer)) == 0)
    recorder.stop()
    buffer.close()
