"""Files are whole or absent: after success, after failure, after a kill, on a full disk."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftkit import artifacts
from draftkit.artifacts import (
    atomic_path,
    fingerprint,
    machine,
    provenance,
    read_json,
    recover,
    recover_tree,
    remove,
    sha256_file,
    sha256_tree,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_failed_write_changes_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "product"
    if kind == "file":
        path.write_text("old")
    else:
        path.mkdir()
        (path / "old").write_text("old")

    def fail() -> None:
        with atomic_path(path) as temporary:
            if kind == "file":
                temporary.write_text("half")
            else:
                temporary.mkdir()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == ["product"]
    assert (path if kind == "file" else path / "old").read_text() == "old"


def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_text(tmp_path / "checkpoint" / name, name)
    code = (
        "import os, shutil, signal, sys; from pathlib import Path; from draftkit import artifacts\n"
        "shutil.rmtree = lambda path: ((path / 'one').unlink(), os.kill(os.getpid(), 9))\n"
        "artifacts.remove(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "checkpoint"], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "checkpoint").exists()
    recover_tree(tmp_path)
    assert names(tmp_path) == []
    remove(tmp_path / "checkpoint")


def test_a_folder_that_cannot_take_its_place_gives_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "model" / "old", "old")

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError

    def put() -> None:
        with atomic_path(tmp_path / "model") as temporary:
            temporary.mkdir()
            monkeypatch.setattr(Path, "replace", refuse)

    with pytest.raises(PermissionError):
        put()
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["old"]


def test_a_file_reaches_the_disk_before_its_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace, sync = Path.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), sync(file))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), replace(self, to))[1]
    )
    write_text(tmp_path / "a.txt", "text")
    assert calls == ["fsync", "rename", "fsync"]


KILLED = """
import os, signal, sys
from pathlib import Path
from draftkit.artifacts import atomic_path
path, moment = Path(sys.argv[1]), sys.argv[2]
if moment == "between the two renames":
    Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
with atomic_path(path) as temporary:
    temporary.mkdir()
    (temporary / "new").write_text("half")
    if moment == "while writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["while writing", "between the two renames"])
def test_the_next_open_clears_up_after_a_kill(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("whole")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), moment], check=False)
    assert done.returncode == -9
    assert names(tmp_path) != ["model"]
    recover_tree(tmp_path)
    assert names(tmp_path) == ["model"]
    assert (path / "old").read_text() == "whole"
    write_text(path / "again", "works")


def test_a_living_writer_is_not_disturbed(tmp_path: Path) -> None:
    other = tmp_path / f".a.txt.tmp-{os.getppid()}"
    other.write_text("still being written")
    recover(tmp_path / "a.txt")
    assert other.exists()


def test_json_has_no_nan_and_a_torn_file_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1.0, math.nan, math.inf], "path": tmp_path})
    assert read_json(tmp_path / "a.json") == {"x": [1.0, None, None], "path": str(tmp_path)}
    (tmp_path / "a.json").write_text('{"x": ')
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_checksums_see_names_and_bytes_and_nothing_else(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_text(tmp_path / folder / "sub" / "b.txt", "b")
        write_text(tmp_path / folder / "a.txt", "a")
    os.utime(tmp_path / "two" / "a.txt", (0, 0))
    assert sha256_tree(tmp_path / "one") == sha256_tree(tmp_path / "two")
    assert sha256_file(tmp_path / "one" / "a.txt") == sha256_file(tmp_path / "two" / "a.txt")
    write_text(tmp_path / "two" / "wandb" / "log", "ignored")
    assert sha256_tree(tmp_path / "one") != sha256_tree(tmp_path / "two")
    skipped = sha256_tree(tmp_path / "two", skip=lambda name: name == "wandb")
    assert sha256_tree(tmp_path / "one") == skipped
    (tmp_path / "two" / "a.txt").rename(tmp_path / "two" / "c.txt")
    assert skipped != sha256_tree(tmp_path / "two", skip=lambda name: name == "wandb")


def test_a_fingerprint_stands_for_the_value_not_for_the_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})
    assert len(fingerprint({})) == 16


def test_provenance_names_code_versions_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "abc123", "status": " M draftkit/config.py"}
    monkeypatch.setattr(artifacts, "_git", lambda command, *rest: said[command])
    monkeypatch.setattr(sys, "argv", ["/somewhere/pipelines/distill.py", "seed=1"])
    origin = provenance()
    assert origin["git_commit"] == "abc123"
    assert origin["git_dirty"] is True
    assert origin["argv"] == ["distill.py", "seed=1"]
    assert {"torch", "transformers", "hydra-core"} <= set(origin["versions"])
    assert origin["hardware"]["cores"] >= 1
    assert origin["hardware"]["memory_bytes"] > 1 << 28
    assert origin["hardware"]["torch_threads"] == 1
    json.dumps(origin)


def test_provenance_without_a_checkout_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_git", lambda *command: None)
    origin = provenance()
    assert origin["git_commit"] is None
    assert origin["git_dirty"] is None


def test_a_machine_is_named_by_the_threads_that_compute() -> None:
    before = torch.get_num_threads()
    try:
        for count, text in ((1, ", 1 thread"), (2, ", 2 threads")):
            torch.set_num_threads(count)
            assert machine(gpu=False).endswith(text)
    finally:
        torch.set_num_threads(before)
