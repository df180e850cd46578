"""What a name of the hub is refused for: against a server that answers as the hub does, and none.

The server is on this machine, and counts requests: libraries alone would send a dozen.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from draftkit.config import Config, DataConfig, DraftConfig, TargetConfig
from draftkit.data.corpora import read_documents
from draftkit.hub import hub_has
from draftkit.models.files import ModelFolder
from draftkit.models.loading import load_model
from draftkit.models.served import served_sampling

NAME, FILE = "somebody/a-model", "config.json"
CLOSED = "http://127.0.0.1:9"  # no service listens there


class Hub(ThreadingHTTPServer):
    """Answers every request with `status`, and the error `code` that the hub sends with it."""

    status, code, requests = 200, "", 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.requests += 1
        self.send_response(self.server.status)
        if self.server.code:
            self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def reach(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let the hub be at `address`, though tests are offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        reach(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "has"),
    [(200, "", True), (404, "EntryNotFound", False), (503, "", True)],
)
def test_the_hub_gets_one_request(server: Hub, status: int, code: str, has: bool) -> None:
    server.status, server.code = status, code
    assert hub_has(NAME, FILE, section="target") is has
    assert server.requests == 1


@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        (
            404,
            "RepoNotFound",
            r"target\.path {}: no folder here, .*revision=old: correct .*`hf auth",
        ),
        (401, "", r"target\.path {}: no folder here, .*revision=old: correct .*`hf auth"),
        (403, "GatedRepo", r"target\.path {}: .*accept its conditions: do so on http.*{}, and"),
        (
            404,
            "RevisionNotFound",
            r"target\.path {}: .* no config\.json of it at target.revision=old",
        ),
    ],
)
def test_what_the_hub_does_not_hand_out_is_refused_by_its_key(
    server: Hub, status: int, code: str, line: str
) -> None:
    server.status, server.code = status, code
    model = TargetConfig(path=NAME, revision="old")
    with pytest.raises(ValueError, match="^" + line.replace("{}", NAME)) as error:
        ModelFolder(model)
    assert "\n" not in str(error.value)
    assert server.requests == 1


def test_a_repository_without_a_configuration_holds_no_model(server: Hub) -> None:
    server.status, server.code = 404, "EntryNotFound"
    with pytest.raises(
        ValueError,
        match=rf"^draft\.path {NAME}: no folder here, and the hub has no config\.json of",
    ):
        ModelFolder(DraftConfig(path=NAME))


@pytest.mark.parametrize("offline", [True, False])
def test_without_network_whatever_reads_a_model_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, offline: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    if not offline:
        reach(monkeypatch, CLOSED)
    model, line = TargetConfig(path=NAME), rf"^target\.path {NAME}: .*`hf download {NAME} "
    for read in (
        lambda: ModelFolder(model).tokenizer,
        lambda: ModelFolder(model).config,
        lambda: load_model(model, dtype="auto", device=None),  # type: ignore[arg-type]
        lambda: served_sampling(model, {}),
    ):
        with pytest.raises(ValueError, match=line) as error:
            read()
        assert ("HF_HUB_OFFLINE" if offline else f"{CLOSED} does not answer (") in str(error.value)
        assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")  # no retries, which would be announced


@pytest.mark.parametrize("offline", [True, False])
def test_a_data_set_without_network_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, offline: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    if not offline:
        reach(monkeypatch, CLOSED)
    data = DataConfig(name="hub", path="somebody/rows")
    with pytest.raises(ValueError, match=r"^data\.path somebody/rows: .* data=local data\.path="):
        next(read_documents(data))
    with pytest.raises(ValueError, match=r"^data\.path a/b/c: .*no name of the hub: correct it$"):
        next(read_documents(DataConfig(name="hub", path="a/b/c")))
    assert capfd.readouterr() == ("", "")


def test_what_is_in_the_cache_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    reach(monkeypatch, CLOSED)
    repository, commit = cache / "models--somebody--a-model", "0" * 40
    for path, text in (
        ("refs/main", commit),
        (f"snapshots/{commit}/{FILE}", '{"model_type": "llama"}'),
        (f".no_exist/{commit}/generation_config.json", ""),
    ):
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    assert hub_has(NAME, FILE, section="target")
    assert hub_has(NAME, FILE, section="target", revision=commit)
    assert served_sampling(TargetConfig(path=NAME), {})[0] == Config().sampling
    with pytest.raises(ValueError, match="does not answer"):
        hub_has(NAME, "other.json", section="target")
