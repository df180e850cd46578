"""The service folder: of one target and one starting drafter, cleared by whoever is alone in it."""

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftkit.artifacts import locked, read_json, write_json
from draftkit.config import Config, DraftConfig
from draftkit.models.compatibility import TARGET_SHA256
from draftkit.online.buffer import Buffer
from draftkit.online.registry import Version
from pipelines.configuration import compose_config
from pipelines.online import online
from pipelines.rollback import rollback
from pipelines.serve import serve
from pipelines.service import checksums_of, daemon_folder, registry_of, service_folder
from tests.engines import making
from tests.engines.heads import fitted
from tests.online.traffic import entry, stored
from tests.pairs import OTHERS, paths, save_pairs
from tests.services import buffer_of, pair_of, seeded_registry

FIXED = ["name=service", "serve.port=0", "hardware=cpu", "hardware.threads=1", "tracker=none"]
FIXED += ["decode.compile='false'", "optim.compile='false'", "serve.adapts=false"]
FIXED += ["online.anchor_fraction=0", "online.gate.anchors=0"]
KEYS = {name: name for name in OTHERS} | {"top_k": "online.buffer.top_k"}
COMMANDS = {"serve": (serve, "refit"), "online": (online, "server")}  # and the role of the other


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder)
    return folder


@pytest.fixture
def config(pairs: Path, tmp_path: Path) -> Config:
    return compose_config([*FIXED, *paths(pairs / "pair"), f"root={tmp_path}"])


def other(config: Config, pairs: Path, name: str) -> Config:
    """`config` with what `name` of `KEYS` says changed."""
    if name == "top_k":
        buffer = replace(config.online.buffer, top_k=7)
        return replace(config, online=replace(config.online, buffer=buffer))
    changed = replace(getattr(config, name), path=str(pairs / name / name))
    return replace(config, **{name: changed})


def count(config: Config) -> int:
    """Records of the service, whatever it is made with."""
    path = service_folder(config) / "buffer.sqlite"
    buffer = Buffer(path, config.online.buffer)
    found = len(stored(buffer))
    buffer.close()
    return found


def begin(config: Config) -> Version:
    """A service with a record, a version, a state of a trainer and the daemon's account."""
    buffer = buffer_of(config)
    buffer.append([entry(0)])
    buffer.close()
    version = seeded_registry(config).current()
    state = service_folder(config) / "refit" / "default" / "state.safetensors"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"")
    write_json(daemon_folder(config) / "summary.json", {"versions_published": 9})
    assert version is not None
    return version


@pytest.fixture
def _in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Server and daemon load all that they need, and end where they would begin to wait."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr("draftkit.serving.server.Server.run", lambda *_, **__: None)
    monkeypatch.setattr("os.nice", lambda more: more)
    monkeypatch.setattr("draftkit.online.daemon.Daemon.run", lambda self: None)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("name", KEYS)
def test_records_and_versions_of_something_else_are_refused_by_its_key(
    config: Config, pairs: Path, name: str
) -> None:
    begin(config)
    changed, key = other(config, pairs, name), KEYS[name]
    with pytest.raises(ValueError, match=rf"made with another {key}: use name=.*overwrite=true"):
        buffer_of(changed)
    if name == "top_k":  # what is stored of the target; a drafter has nothing of it
        seeded_registry(changed)
    else:
        with pytest.raises(ValueError, match=rf"made with another {key}: use name=") as error:
            seeded_registry(changed)
        assert "\n" not in str(error.value)
    buffer_of(config).close()
    seeded_registry(config)


@pytest.mark.usefixtures("_in_process")
@pytest.mark.parametrize("command", COMMANDS)
def test_server_and_daemon_refuse_the_service_of_another_draft(
    config: Config, pairs: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = begin(config)
    run, _ = COMMANDS[command]
    run(config)
    with pytest.raises(ValueError, match="made with another draft"):
        run(other(config, pairs, "draft"))
    (service_folder(config) / "buffer.sqlite").unlink()  # the versions know it too
    with pytest.raises(ValueError, match="made with another draft"):
        run(other(config, pairs, "draft"))
    assert registry_of(config, "default").current() == version


@pytest.mark.usefixtures("_in_process")
@pytest.mark.parametrize("command", COMMANDS)
def test_server_and_daemon_take_a_head(tmp_path: Path, command: str) -> None:
    model = making.model(num_hidden_layers=7, num_key_value_heads=4)
    making.saved(model, tmp_path / "target")
    head = fitted(model, torch.arange(48).view(2, 24), ids=torch.arange(30), wide=16)
    words = [f"target.path={tmp_path / 'target'}", f"draft.path={head.write(tmp_path / 'head')}"]
    words += ["draft.accept_target=true", f"root={tmp_path}"]
    config = compose_config([*FIXED, *words])
    COMMANDS[command][0](config)
    version = registry_of(config, "default").current()
    assert version is not None
    written = load_file(version.path / "model.safetensors")
    assert torch.equal(written["d2t"], head.tensors["d2t"])
    assert not (version.path / "kept_ids.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_server_and_daemon_refuse_a_head_of_another_target(
    config: Config, pairs: Path, tmp_path: Path, command: str
) -> None:
    begin(config)
    shutil.copytree(pairs / "pair" / "target", tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    head = {"architectures": ["MedusaHeads"], "medusa_heads": 2, TARGET_SHA256: "0" * 64}
    write_json(path, read_json(path) | {**head, "draft_vocab_size": 9})
    given = replace(config, draft=DraftConfig(path=str(tmp_path / "head")), overwrite=True)
    run, _ = COMMANDS[command]
    with pytest.raises(
        ValueError, match=r"was made for another target .* draft\.accept_target=true$"
    ):
        run(given)
    assert count(config) == 1  # nothing was cleared
    accepted = replace(given, draft=replace(given.draft, accept_target=True))
    assert {*checksums_of(accepted, pair_of(accepted))} == {"target", "draft"}
    write_json(path, read_json(path) | {TARGET_SHA256: pair_of(given).digests["target"]})
    checksums_of(given, pair_of(given))


@pytest.mark.usefixtures("_in_process")
@pytest.mark.parametrize("command", COMMANDS)
def test_overwrite_clears_the_service_unless_the_other_process_runs(
    config: Config, pairs: Path, command: str
) -> None:
    begin(config)
    run, role = COMMANDS[command]
    changed = replace(other(config, pairs, "draft"), overwrite=True)
    folder = service_folder(config)
    with locked(folder / role), pytest.raises(ValueError, match="in use by another"):
        run(changed)
    assert count(config) == 1
    assert (folder / "refit" / "default" / "state.safetensors").exists()
    pushed = folder / "pushed" / "default" / "v000002"  # a name that comes again
    pushed.mkdir(parents=True)
    foreign = folder / "notes.txt"
    foreign.write_text("somebody's")
    page = folder / "report.html"
    page.write_text("the old one")
    run(changed)
    assert count(config) == 0
    assert not page.exists() or "the old one" not in page.read_text()
    assert not pushed.exists()
    assert not (folder / "refit" / "default" / "state.safetensors").exists()
    (version,) = registry_of(config, "default").versions()
    assert version.name == "v000001"
    start = load_file(pairs / "draft" / "draft" / "model.safetensors")
    weights = load_file(version.path / "model.safetensors")
    assert all(torch.equal(weights[name], start[name]) for name in start)
    account = daemon_folder(config) / "summary.json"
    assert not account.exists() or read_json(account)["versions_published"] == 0
    assert foreign.read_text() == "somebody's"
    run(replace(changed, overwrite=False))


def test_a_pair_that_cannot_be_used_clears_nothing(config: Config, tmp_path: Path) -> None:
    begin(config)
    missing = replace(config.draft, path=str(tmp_path / "missing"))
    for run, _ in COMMANDS.values():
        with pytest.raises(ValueError, match=r"draft\.path"):
            run(replace(config, draft=missing, overwrite=True))
    assert count(config) == 1


def test_a_refused_rollback_leaves_nothing(tmp_path: Path) -> None:
    config = compose_config(["+experiment=serve", f"root={tmp_path}"])
    with pytest.raises(ValueError, match="has no version yet"):
        rollback(config)
    assert list(tmp_path.iterdir()) == []
