"""Engines as they are driven, against what real ones have answered (`recorded`)."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.engines import drivers
from tests.engines.drivers import DRIVERS, Launch, LlamaServer, VllmServer, environment_of

RECORDED = Path(__file__).parent / "recorded"
RUNS: Any = Mock(poll=lambda: None)  # stands for a process that goes on
GAMMA = 4


def launch(folder: Path, **changes: Any) -> Launch:
    given = {"folder": folder, "target": "T", "gamma": GAMMA, "length": 100}
    given |= {"environment": folder, "log": folder / "log"}
    return Launch(**given | changes)


@contextmanager
def replaying(name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers as the recorded one did, and the requests that it got."""
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            got.append({"path": self.path, "body": json.loads(self.rfile.read(length) or "null")})
            if self.path == "/health":
                text = "{}"
            else:
                number = next(n for n, one in enumerate(recorded) if one["path"] == self.path)
                text = recorded.pop(number)["text"]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = answer

        def log_message(self, *arguments: Any) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_vllm_counted_is_read_answer_by_answer(tmp_path: Path) -> None:
    """Of prompts with 8 tokens an answer: the first comes alone, the others in passes."""
    with (
        replaying("vllm") as (url, got),
        closing(VllmServer(launch(tmp_path, drafts="sampled"), url, RUNS)) as engine,
    ):
        engine.wait()
        answers = engine.answers([[1, 2], [3, 4, 5]], temperature=0, limit=8, seed=1)
    assert engine.version.startswith("0.32")
    for one in answers:
        assert len(one.ids) == 8
        assert one.by_position is not None
        assert len(one.by_position) == GAMMA
        assert sum(one.by_position) == one.accepted
        assert 8 <= 1 + one.passes + one.accepted <= 8 + GAMMA
    assert sum(one.accepted for one in answers) > 0
    requests = [one["body"] for one in got if one["path"] == "/v1/completions"]
    assert [one["prompt"] for one in requests] == [[1, 2], [3, 4, 5]]
    assert requests[0]["seed"] != requests[1]["seed"]
    assert {one["max_tokens"] for one in requests} == {8}


def test_what_llama_cpp_counted_is_read_answer_by_answer(tmp_path: Path) -> None:
    with (
        replaying("llamacpp") as (url, got),
        closing(LlamaServer(launch(tmp_path, drafts="argmax"), url, RUNS)) as engine,
    ):
        engine.wait()
        answers = engine.answers([[1, 2], [3, 4, 5]], temperature=0, limit=8, seed=1)
    assert engine.version
    for one in answers:
        assert len(one.ids) == 8
        assert one.by_position is None
        assert one.passes + one.accepted == 7  # the first token comes with the prompt
    assert sum(one.accepted for one in answers) > 0
    requests = [one["body"] for one in got if one["path"] == "/completion"]
    assert [one["prompt"] for one in requests] == [[1, 2], [3, 4, 5]]


def test_an_answer_of_llama_cpp_that_ended_counts_by_its_proposals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = {"draft_n": 2 * GAMMA, "draft_n_accepted": 5}
    made = {"tokens": [1] * 7, "timings": timings, "stop_type": "eos"}

    class Response:
        def json(self) -> Any:
            return made

    server = LlamaServer(launch(tmp_path), "http://127.0.0.1:9", RUNS)
    monkeypatch.setattr(server, "request", lambda *_, **__: Response())
    assert server.answer([1], temperature=0, limit=20, seed=0).passes == 2
    server.close()


def test_a_server_that_ends_at_its_start_says_where_its_words_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    script.chmod(0o755)
    with (
        pytest.raises(ValueError, match=r"^engine: it ended with status 3; .*log$"),
        drivers.vllm(launch(tmp_path)),
    ):
        pass
    assert "no such model" in (tmp_path / "log").read_text()


def test_counters_that_do_not_move_are_no_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "COUNT_SECONDS", 0.05)
    server = VllmServer(launch(tmp_path), "http://127.0.0.1:9", RUNS)
    monkeypatch.setattr(server, "counters", lambda: {VllmServer.TOKENS: 3.0})
    with pytest.raises(ValueError, match="does not count the answers"):
        server.counters_after({VllmServer.TOKENS: 1.0}, 8)
    server.close()


def test_each_side_is_started_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    @contextmanager
    def noted(_: Launch, __: Any, command: Any) -> Iterator[None]:
        commands.append(command(1234))
        yield

    monkeypatch.setattr(drivers, "serving", noted)
    (tmp_path / "llamacpp").mkdir()
    for name in ("target-f32.gguf", "draft-f32.gguf"):
        (tmp_path / "llamacpp" / name).touch()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"pard_token": 3}')
    for way in (None, "argmax", "sampled"):
        given = launch(tmp_path, drafts=way, threads=2)
        for start in (drivers.vllm, drivers.llamacpp):
            with start(given):
                pass
    vllm, llamacpp = commands[::2], commands[1::2]
    assert ["--speculative-config" in one for one in vllm] == [False, True, True]
    options = [json.loads(one[one.index("--speculative-config") + 1]) for one in vllm[1:]]
    assert [one.get("draft_sample_method") for one in options] == [None, "probabilistic"]
    assert {one["num_speculative_tokens"] for one in options} == {GAMMA}
    assert {one["parallel_drafting"] for one in options} == {True}  # as the drafter's config says
    assert ["-md" in one for one in llamacpp] == [False, True, True]
    assert all(one[one.index("-fa") + 1] == "off" for one in llamacpp)
    assert [one.count("f32") for one in llamacpp] == [2, 4, 4]
    for one in commands:
        assert one[one.index("--host") + 1] == "127.0.0.1"


def test_what_is_started_ends_with_the_block(tmp_path: Path) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(1, flush=True); "
    command = [sys.executable, "-c", code + "time.sleep(60)"]
    with drivers.running(launch(tmp_path), command, piped=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
    assert process.returncode is not None
    assert process.stdout.closed


def test_an_environment_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in DRIVERS:
        if name != "transformers":
            with pytest.raises(ValueError, match=rf"^there is no \.engines/{name}.*make engines"):
                environment_of(name)
    assert environment_of("transformers") == Path(sys.prefix)


def test_only_the_plugin_that_is_wanted_is_loaded_and_nothing_is_sent(tmp_path: Path) -> None:
    plain = drivers.environment_variables(launch(tmp_path))
    assert (plain["VLLM_PLUGINS"], plain["VLLM_NO_USAGE_STATS"]) == ("", "1")
    plugged = drivers.environment_variables(launch(tmp_path, plugin="mend", threads=3))
    assert (plugged["VLLM_PLUGINS"], plugged["OMP_NUM_THREADS"]) == ("mend", "3")
