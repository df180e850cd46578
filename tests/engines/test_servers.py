"""How servers are started and ended, without any engine."""

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines import servers
from tests.engines.servers import COMMANDS, Launch, environment, serving

SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

subprocess.Popen(["sleep", "600"], stdout=open("{fifo}", "wb"))  # which holds the pipe
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launch(folder: Path, **changes: Any) -> Launch:
    given: dict[str, Any] = {"folder": folder, "target": folder / "target", "gamma": 4}
    return Launch(**given | {"length": 100, "drafts": "argmax"} | changes)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An engine whose program is the text under `code`."""
    program = {"code": SERVER}

    def command(launch: Launch, port: int) -> list[str]:
        return [sys.executable, "-c", program["code"], str(port)]

    monkeypatch.setitem(servers.COMMANDS, "vllm", command)
    monkeypatch.setattr(servers, "missing", lambda name: None)
    return program


def test_a_server_answers_inside_the_block_and_ends_with_all_that_it_started(
    tmp_path: Path, started: dict[str, str]
) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    started["code"] = SERVER.replace("{fifo}", str(held))
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    hung_up = select.poll()
    hung_up.register(reading, select.POLLHUP)
    with serving("vllm", launch(tmp_path)) as url:
        assert url.startswith("http://127.0.0.1:")
        assert hung_up.poll(0) == []  # the child runs
    assert hung_up.poll(60_000)
    os.close(reading)


def test_a_server_that_ends_at_its_start_says_where_its_words_are(
    tmp_path: Path, started: dict[str, str]
) -> None:
    started["code"] = "print('no such model'); raise SystemExit(3)"
    with (
        pytest.raises(ValueError, match=r"^the engine ended with status 3; .*engine\.log$"),
        serving("vllm", launch(tmp_path)),
    ):
        pass
    assert "no such model" in (tmp_path / "engine.log").read_text()


def test_an_engine_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engines.environments.FOLDER", tmp_path)
    with (
        pytest.raises(ValueError, match=r"^no \.engines/vllm: make engines"),
        serving("vllm", launch(tmp_path)),
    ):
        pass


def test_each_engine_is_started_with_the_options_of_export(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    config = '{"model_type": "llama", "pard_token": 3}'
    (tmp_path / "hf" / "config.json").write_text(config)
    for drafts, method in (("argmax", None), ("probabilistic", "probabilistic")):
        words = COMMANDS["vllm"](launch(tmp_path, drafts=drafts), 1234)
        options = json.loads(words[words.index("--speculative-config") + 1])
        assert options.get("draft_sample_method") == method
        assert options["num_speculative_tokens"] == 4
        assert options["parallel_drafting"] is True  # as the drafter's config says
    words = COMMANDS["llamacpp"](launch(tmp_path), 1234)
    assert words[words.index("--spec-draft-n-max") + 1] == "4"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    variables = environment(launch(tmp_path, plugin="mend"))
    assert (variables["VLLM_PLUGINS"], variables["VLLM_NO_USAGE_STATS"]) == ("mend", "1")
