"""The loop around vLLM: what is asked, what is counted, and what must not be lost or left behind.

The whole of it is the command, which needs vLLM.
"""

import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import Config
from draftkit.engines.counters import ACCEPTED, PASSES, VLLM, Answer
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.experiments import loop_vllm
from pipelines.experiments.loop_vllm import (
    LOT,
    LOTS,
    MAX_NEW_TOKENS,
    STAGE,
    around,
    draw,
    halves,
    loaded,
    of_all,
    prompts_of,
    tokens_a_pass,
    wait_for,
)
from pipelines.plan import TEXTS
from pipelines.product import plan
from pipelines.stage import ensure
from tests.online.traffic import entry, stored
from tests.pairs import paths, save_pairs
from tests.services import buffer_of, seeded_registry
from tests.serving.fakes import FakeEngine, serving
from tests.smoke import splits_of
from tests.test_online import BARE, SMALL


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The experiment with a pair that lies there; texts are made once for all."""
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder)
    pair = paths(folder / "pair")
    return ["+experiment=loop_vllm", *BARE, *SMALL, *pair, f"root={folder / 'outputs'}"]


@pytest.fixture
def config(words: list[str], tmp_path: Path) -> Config:
    """With a service of its own."""
    return compose_config([*words, f"name={tmp_path.name}"])


def test_traffic_goes_over_to_a_domain_that_the_drafter_has_not_read(config: Config) -> None:
    texts = ensure(TEXTS, of_all(config))
    requests, held_out = prompts_of(texts)
    assert [domain for domain, _ in requests] == [
        domain for domain, lots in LOTS.items() for _ in range(lots * LOT)
    ]
    read = splits_of(config)
    assert {one.domain for one in read.train} == {"prose"}
    asked = {tuple(prompt) for _, prompt in requests}
    assert held_out
    assert not asked & {tuple(prompt) for prompt in held_out}
    own = {tuple(one.prompt_ids): one.domain for one in splits_of(of_all(config)).test}
    assert {own[tuple(prompt)] for prompt in held_out} == {"cpp"}


def test_the_engine_is_teacher_and_gets_the_versions(config: Config) -> None:
    both = around(config, "http://127.0.0.1:9")
    assert (both.target.urls, both.engine.url) == (["http://127.0.0.1:9"], "http://127.0.0.1:9")
    assert both.online.push == "vllm"
    assert both.scored_by_engine
    assert halves([0, 1]) == ([0], [1])
    assert halves([3]) == ([3], [3])
    assert halves(range(5)) == (range(2), range(2, 5))


def test_a_lot_is_counted_by_the_engine_and_drawn(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind it two requests of each lot have begun a round of two accepted proposals."""
    counts = iter(range(99))

    def counters(self: Any) -> dict[str, float]:
        number = next(counts)
        return {PASSES[VLLM]: 10.0 * number, f"{ACCEPTED}_total": 15.0 * number}

    monkeypatch.setattr(loop_vllm.Server, "counters", counters)
    monkeypatch.setattr(loop_vllm.Server, "__init__", lambda self, endpoint: None)
    monkeypatch.setattr(loop_vllm, "LOT", 3)
    registry = seeded_registry(config)
    registry.note_served("v000001")
    engine, notes = FakeEngine(), list[str]()
    requests = [("prose", [5, 6])] * 3 + [("cpp", [7])] * 2
    with serving(engine) as address:
        lots = loaded(config, f"http://{address}", f"http://{address}", requests, notes.append)
    assert [one["requests"] for one in lots] == [3, 5]
    assert [one["domain"] for one in lots] == ["prose", "cpp"]
    assert {one["acceptance_length"] for one in lots} == {2.5}
    assert {one["version"] for one in lots} == {"v000001"}
    assert len(engine.jobs) == len(requests)
    assert len(notes) == len(lots)
    draw(lots, tmp_path / "loop.png")
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_a_pass_are_those_behind_the_first_over_the_passes() -> None:
    made = [
        Answer(tokens=MAX_NEW_TOKENS, seconds=1.0, passes=passes, accepted=accepted)
        for passes, accepted in ((10, 20), (30, 10))
    ]
    rate = tokens_a_pass(made)
    assert rate.mean == pytest.approx((30 + 40) / 40)


def test_an_engine_that_ends_names_its_log(tmp_path: Path) -> None:
    process = subprocess.Popen(["false"])
    process.wait()
    with pytest.raises(ValueError, match=rf"^vLLM did not start: {tmp_path}"):
        wait_for("http://127.0.0.1:9", process, tmp_path / "engine.log")


def test_without_vllm_the_way_out_is_said(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^loop_vllm needs vLLM: run `make engines` first"):
        launch(STAGE, config)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_vllm, "python_of_vllm", lambda: "python")


@pytest.mark.usefixtures("found")
def test_a_service_that_was_there_before_is_not_cleared_unasked(config: Config) -> None:
    buffer = buffer_of(config)
    buffer.append([entry(0)])
    buffer.close()
    for _ in range(2):  # a refused run does not make it the experiment's own
        with pytest.raises(ValueError, match=r"has not begun: use name=\.\.\., or overwrite=true"):
            launch(STAGE, config)
    buffer = buffer_of(config)
    assert len(stored(buffer)) == 1
    buffer.close()


USED = ["decode.gamma", "draft.lora.rank", "generate.rollouts", "evaluate.max_new_tokens"]


@pytest.mark.usefixtures("found")
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

    forking.Process(target=loop_vllm.attended, args=(task, Config())).start()
    read.recv()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_ends_with_the_experiment_that_started_it() -> None:
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


def test_heads_that_no_engine_serves_are_one_line(words: list[str]) -> None:
    config = compose_config([*words, "draft=medusa", "draft.path=null"])
    with pytest.raises(ValueError, match=r"^draft\.kind=medusa is served by no engine: use plain"):
        loop_vllm.check(config)
