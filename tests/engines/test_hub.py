"""Uploads, against a server that answers as the hub's documented routes do."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from draftkit.engines.folder import upload

NAME, SHA = "somebody/a-draft", "0" * 40
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(99)), "README.md": b"---\n---\n"}


class Hub(ThreadingHTTPServer):
    """Keeps what is created and committed. refuses: every request is answered 403."""

    refuses = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self.server_port}/{NAME}"
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        path, address = self.path.partition("?")[0], self.server.address
        if self.server.refuses:
            self._answer(403, {"error": "you may not"})
        elif path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": address, "name": NAME})
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answers = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            self._answer(200, {"files": [{**one, "shouldIgnore": False} for one in answers]})
        elif path == f"/api/models/{NAME}/commit/main":
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    value = entry["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            self._answer(200, {"commitOid": SHA, "commitUrl": f"{address}/commit/{SHA}"})
        else:
            self._answer(200, {})

    def do_GET(self) -> None:
        if self.server.refuses:
            return self._answer(403, {"error": "you may not"})
        self._answer(200, {"id": NAME, "sha": SHA, "siblings": []})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        address = server.address.removesuffix(f"/{NAME}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(address, token="hf_none"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_model_and_card_arrive_in_a_private_repository_and_nothing_else(
    server: Hub, folder: Path
) -> None:
    (folder / "launch.md").write_text(str(folder))  # which names folders of this machine
    assert upload(folder, NAME) == f"{server.address}/commit/{SHA}"
    assert server.files == FILES
    (created,) = server.created
    assert (created["organization"], created["name"]) == tuple(NAME.split("/"))
    assert created.get("private") is True or created.get("visibility") == "private"


@pytest.mark.parametrize("name", [NAME, "no//name"])
def test_a_refusal_is_one_line(server: Hub, folder: Path, name: str) -> None:
    server.refuses = True
    with pytest.raises(ValueError, match=rf"^export\.push_to_hub={name}: .*`hf auth") as error:
        upload(folder, name)
    assert "\n" not in str(error.value)
    assert server.files == {}


def test_a_hub_that_does_not_answer_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi("http://127.0.0.1:9", token="hf_x"))
    with pytest.raises(ValueError, match=rf"^export\.push_to_hub={NAME}: .*`hf auth") as error:
        upload(folder, NAME)
    assert "\n" not in str(error.value)
