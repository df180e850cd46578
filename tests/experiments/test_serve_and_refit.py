"""Server and daemon as two processes under load: two routes, each with a drafter of its own."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from draftkit.endpoint import Endpoint
from draftkit.online.buffer import Served
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.experiments import serve_and_refit
from pipelines.experiments.serve_and_refit import (
    MAX_NEW_TOKENS,
    STAGE,
    ask,
    requests_of,
)
from pipelines.plan import TEXTS
from pipelines.product import plan
from pipelines.serve import serve
from pipelines.service import daemon_folder, registry_of
from pipelines.stage import ensure
from tests.online.traffic import entry, stored
from tests.pairs import paths, save_pairs
from tests.services import buffer_of, seeded_registry
from tests.serving.fakes import FakeEngine, serving
from tests.smoke import splits_of
from tests.test_online import BARE, SMALL, composed, ended, fork

ROUTES = ["online.routes=[default,code]"]
EAGER = [
    "online.gate.fraction=0.5",
    "online.min_records=16",  # of some 60 about half are trained on
    "online.steps=30",
    "optim.learning_rate=1e-2",
]


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_each_route_is_served_recorded_and_refitted_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole experiment, then a daemon that has time enough for one update of each route."""
    monkeypatch.setattr(serve_and_refit, "REQUESTS", 60)
    monkeypatch.setattr(serve_and_refit, "MAX_NEW_TOKENS", 12)
    words = ["+experiment=serve_and_refit", *ROUTES, *EAGER]
    config = composed(tmp_path, *words)
    summary = read_json(ensure(STAGE, config) / "summary.json")
    assert summary["alive"] == {"server": True, "daemon": True}
    assert summary["requests"] == 120
    served = {"default": 0, "code": 0}
    for row in summary["served"]:
        served[row["route"]] += row["requests"]
    assert served == {"default": 60, "code": 60}
    buffer = buffer_of(config)
    prompts = {
        domain: {tuple(one.prompt_ids) for one in splits_of(config).train if one.domain == domain}
        for domain in ("prose", "cpp")
    }
    for route, domain in (("default", "prose"), ("code", "cpp")):
        kept = [tuple(one.prompt_ids) for one in stored(buffer, route)]
        assert len(kept) == 60
        assert set(kept) <= prompts[domain]
    buffer.close()
    begun = summary.get("versions_published", 0) + summary.get("versions_rejected", 0)
    if begun < 2:  # the load had ended before the daemon was there
        done = fork(tmp_path, config.name, *ROUTES, *EAGER, f"online.most_updates={2 - begun}")
        assert "all updates done" in ended(done)
    for route in ("default", "code"):
        registry = registry_of(config, route)
        first, *later = registry.versions()
        assert later, route
        assert registry.current() == later[-1]
        assert later[0].parent == first.name
    weights = [registry_of(config, route).versions()[-1] for route in ("default", "code")]
    assert weights[0].sha256 != weights[1].sha256


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The experiment with a pair that lies there; texts are made once for all."""
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder)
    pair = paths(folder / "pair")
    return ["+experiment=serve_and_refit", *BARE, *SMALL, *pair, f"root={folder / 'outputs'}"]


@pytest.fixture
def config(words: list[str], tmp_path: Path) -> Config:
    """With a service of its own."""
    return compose_config([*words, f"name={tmp_path.name}"])


def test_requests_of_routes_take_turns_and_another_route_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_and_refit, "REQUESTS", 60)
    two, other = (
        replace(config, online=replace(config.online, routes=["default", name]))
        for name in ("code", "chat")
    )
    requests = requests_of(two, ensure(TEXTS, two))
    assert [route for route, _ in requests] == ["default", "code"] * 60
    with pytest.raises(ValueError, match=r"^online\.routes: .* default, code, no chat$"):
        launch(STAGE, other)


def test_every_request_goes_by_its_route_and_all_are_counted() -> None:
    engine = FakeEngine()
    with serving(engine) as address, Endpoint("serve", f"http://{address}") as server:
        load = ask(server, server.model()["id"], [("default", [5, 6]), ("code", [7])] * 3)
    assert sorted(job.route for job in engine.jobs) == ["code"] * 3 + ["default"] * 3
    assert (load["requests"], load["tokens"]) == (6, 6 * MAX_NEW_TOKENS)
    assert 0 < load["median_seconds"] <= load["slowest_seconds"]


@pytest.fixture
def begun(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The version that each run begins with; instead of two processes it leaves what they would.

    That is three answers of the version in force, a record, and a version after it; in the first
    run alone also the daemon's account of one that it published.
    """
    names: list[str] = []

    @contextmanager
    def running(task: Callable[[Config], None], config: Config) -> Iterator[SimpleNamespace]:
        if task is serve:
            registry = seeded_registry(config)
            version = registry.current()
            assert version is not None
            names.append(version.name)
            weights = (version.path / "model.safetensors").read_bytes()

            def write(folder: Path) -> None:
                (folder / "model.safetensors").write_bytes(weights)

            registry.publish(write, metrics={})
            buffer = buffer_of(config)
            buffer.append([entry(0)])
            buffer.add_served([Served(route="default", version=version.name, requests=3)])
            buffer.close()
        elif len(names) == 1:
            write_json(daemon_folder(config) / "summary.json", {"versions_published": 1})
        yield SimpleNamespace(is_alive=lambda: True)

    monkeypatch.setattr(serve_and_refit, "running", running)
    monkeypatch.setattr(Endpoint, "model", lambda self: {"id": "model"})
    monkeypatch.setattr(serve_and_refit, "ask", lambda server, model, requests: {"requests": 3})
    monkeypatch.setattr(serve_and_refit, "requests_of", lambda config, texts: [])
    return names


@pytest.mark.parametrize("overwrite", [True, False])
def test_each_run_begins_with_the_starting_drafter_and_counts_its_own_requests(
    config: Config, begun: list[str], overwrite: bool
) -> None:
    """Redone, or resumed after a kill that came before its summary."""
    first = launch(STAGE, config)
    assert first["versions_published"] == 1
    assert [(row["version"], row["requests"]) for row in first["served"]] == [("v000001", 3)]
    if not overwrite:
        (plan(STAGE, config).folder / "summary.json").unlink()
    again = launch(STAGE, replace(config, overwrite=overwrite))
    assert begun == ["v000001", "v000001"]
    assert [(row["version"], row["requests"]) for row in again["served"]] == [("v000001", 3)]
    assert "versions_published" not in again
    buffer = buffer_of(config)
    assert len(stored(buffer)) == 1
    buffer.close()


def test_a_service_that_was_there_before_is_not_cleared_unasked(
    config: Config, begun: list[str]
) -> None:
    buffer = buffer_of(config)
    buffer.append([entry(0)])
    buffer.close()
    for _ in range(2):  # a refused run does not make it the experiment's own
        with pytest.raises(ValueError, match=r"has not begun: use name=\.\.\., or overwrite=true"):
            launch(STAGE, config)
    buffer = buffer_of(config)
    assert len(stored(buffer)) == 1
    buffer.close()
    launch(STAGE, replace(config, overwrite=True))
    assert begun == ["v000001"]


USED = [
    "decode.gamma",
    "decode.verification",
    "serve.slots",
    "draft.lora.rank",
    "generate.rollouts",
    "evaluate.max_new_tokens",
    "evaluate.batch_size",
]


def test_a_setting_that_the_experiment_uses_makes_it_another(config: Config) -> None:
    assert set(USED) <= set(plan(STAGE, config).settings)


def killed_parent(found: Connection) -> None:
    """Start a server's like as the experiment does, and be killed when it runs."""
    forking = multiprocessing.get_context("fork")
    read, written = forking.Pipe(duplex=False)

    def task(config: Config) -> None:
        found.send("runs")
        written.send("runs")
        time.sleep(600)  # unless it is told to stop

    forking.Process(target=serve_and_refit.attended, args=(task, Config())).start()
    read.recv()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_server_ends_with_the_experiment_that_started_it() -> None:
    """Also where that was killed: else it would go on and hold the service folder."""
    forking = multiprocessing.get_context("fork")
    read, written = forking.Pipe(duplex=False)
    parent = forking.Process(target=killed_parent, args=(written,))
    parent.start()
    written.close()
    assert read.recv() == "runs"
    assert read.poll(60)
    with pytest.raises(EOFError):  # nobody is left who could write
        read.recv()
    parent.join()
