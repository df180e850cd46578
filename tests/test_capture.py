"""The command that records before an engine: its folder, its end, and the logs that it reads."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draftkit.data.corpora import parts_at
from draftkit.data.messages import read_messages
from draftkit.data.rows import TARGET
from draftkit.data.splits import read_splits
from draftkit.online.sink import Sink
from draftkit.serving.intake import conversation_of
from pipelines.capture import capture
from pipelines.configuration import compose_config
from pipelines.plan import TEXTS
from pipelines.product import plan
from pipelines.service import service_folder
from pipelines.stage import ensure
from tests.launching import Forked
from tests.online.test_sink import entry
from tests.online.traffic import stored
from tests.pairs import save_chat_pair
from tests.services import buffer_of
from tests.serving.fakes import TOKENIZER, ask, running
from tests.serving.test_proxy import CHAT, COMPLETION, PROMPT_IDS, Stub

GONE = "engine.url=http://127.0.0.1:9"  # a port at which nobody listens


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pair on disk, as the overrides that name it."""
    return save_chat_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def engine() -> Iterator[str]:
    """An engine that tells no ids, so that none of its prompts is wrong."""
    with running(Stub(knows_ids=False).app) as address:
        yield f"http://{address}/v1"


def words(pair: list[str], root: Path, *more: str) -> list[str]:
    return [*pair, f"root={root}", "name=served", "capture.port=0", *more]


def test_a_proxy_from_start_to_end(pair: list[str], tmp_path: Path, engine: str) -> None:
    """Passes on, records, and on SIGTERM writes what was answered."""
    sink = f"file://{tmp_path}/sink"
    arguments = words(pair, tmp_path, f"engine.url={engine}", f"online.sink={sink}")
    with Forked("pipelines.capture", *arguments) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " is recorded at " in line:
                break
        address = lines[-1].rpartition("http://")[2].removesuffix("/v1\n")
        assert "tells no ids" in "".join(lines)
        assert ask(address, "/v1/completions", COMPLETION).status == 200
        assert ask(address, "/v1/chat/completions", {**CHAT, "stream": True}).status == 200
        with pytest.raises(ValueError, match="service/server"):
            capture(compose_config(arguments))
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    config = compose_config(arguments)
    kept = stored(buffer_of(config))
    assert len(kept) == 3
    files, (part,) = parts_at(sink)
    copied = pq.read_table(part, filesystem=files)
    ids = sorted((one.prompt_ids, one.output_ids) for one in kept)
    assert sorted((row["prompt_ids"], row["output_ids"]) for row in copied.to_pylist()) == ids
    assert copied.schema.metadata[TARGET].decode() == plan(TEXTS, config).digests["target"]
    assert (service_folder(config) / "buffer.sqlite").stat().st_mode & 0o077 == 0


def test_the_parts_of_a_fleet_are_what_a_stage_reads(pair: list[str], tmp_path: Path) -> None:
    """A new part is new data."""
    address = f"file://{tmp_path}/sink"
    config = compose_config(words(pair, tmp_path, "data=local", f"data.path={address}"))
    counts, target = [], plan(TEXTS, config).digests["target"]
    for first in (0, 12):
        sink = Sink(address, target)
        sink.offer([entry(number) for number in range(first, first + 12)])
        sink.close()
        parts_at.cache_clear()  # as in another process
        splits = read_splits(ensure(TEXTS, config))
        counts.append(len(splits.train) + len(splits.validation) + len(splits.test))
    assert counts == [12, 24]
    other = Sink(address, "another")
    other.offer([entry(1)])
    other.close()
    parts_at.cache_clear()
    with pytest.raises(ValueError, match=r"^data\.path .*: recorded of another target \(another\)"):
        ensure(TEXTS, config)
    with pytest.raises(ValueError, match=r"^data\.path memory://nothing is empty"):
        ensure(
            TEXTS, compose_config(words(pair, tmp_path, "data=local", "data.path=memory://nothing"))
        )


def test_chats_of_the_past_become_records(pair: list[str], tmp_path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": "First."},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Second."},
        ]
        for number in range(12)
    ]
    logs = tmp_path / "logs.jsonl"
    logs.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    arguments = words(pair, tmp_path, f"capture.logs={logs}", "sampling.temperature=0.5")
    capture(compose_config(arguments))
    records = stored(buffer_of(compose_config(arguments)))
    assert len(records) == 24
    assert len({one.document for one in records}) == 12
    names = {conversation_of(read_messages(chat)) for chat in chats}
    assert {one.document for one in records} == names  # as the server and the proxy name them
    said = {TOKENIZER.decode(one.output_ids, skip_special_tokens=True).strip() for one in records}
    assert said == {"First.", "Second."}
    assert {one.sampling["temperature"] for one in records} == {0.5}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], r"^engine\.url: name the engine that runs"),
        ([GONE], r"^engine\.url: http://127\.0\.0\.1:9 does not answer"),
        (
            [GONE, "serve.host=0.0.0.0"],
            r"^serve\.host=0\.0\.0\.0 is open",
        ),
        (["capture.logs=no/such.jsonl"], r"no/such\.jsonl"),
    ],
)
def test_what_cannot_be_recorded_is_said_in_one_line(
    pair: list[str], tmp_path: Path, more: list[str], line: str
) -> None:
    with pytest.raises(ValueError, match=line) as error:
        capture(compose_config(words(pair, tmp_path, *more)))
    assert "\n" not in str(error.value)


def test_an_engine_of_another_model_is_refused(pair: list[str], tmp_path: Path) -> None:
    with running(Stub().app) as address:
        config = compose_config(words(pair, tmp_path, f"engine.url=http://{address}"))
        with pytest.raises(ValueError, match=rf"reads .* as \{PROMPT_IDS}, and the tokenizer"):
            capture(config)
