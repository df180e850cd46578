"""Versions come into force between rounds, and are refused where they do not fit."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from draftkit.artifacts import write_json
from draftkit.config import DRAFTED_NAMES
from draftkit.decoding.decoder import Decoder
from draftkit.online.registry import Registry
from draftkit.serving.answers import Job
from draftkit.serving.drafters import START, Drafters, same
from draftkit.serving.engine import Engine
from tests import tiny
from tests.serving.running import (
    DRAFT,
    GREEDY,
    TARGET,
    Client,
    answers,
    ask,
    draft,
    job,
    publish,
    route_of,
    serving,
    until,
    write,
)

WEIGHTS = {name: tensor.clone() for name, tensor in DRAFT.weights().items()}
EXACT = {name: tensor.clone() for name, tensor in TARGET.weights().items()}  # accepts all
PROMPTS = tiny.prompts([5, 17, 9, 30])


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def served(engine: Engine, count: int, **others: Any) -> list[str]:
    """Serve `count` answers; the versions that drafted for them."""
    jobs = [job(PROMPTS[n % 4], 12, **others) for n in range(count)]
    clients = [c for first in range(0, count, 8) for c in answers(engine, *jobs[first : first + 8])]
    return [client.speculation.version for client in clients]


@pytest.mark.parametrize("proposer", DRAFTED_NAMES)
def test_a_version_comes_into_force_between_rounds_and_tags_what_it_drafts(
    proposer: str, registry: Registry
) -> None:
    with serving(registries={"default": registry}, proposer=proposer) as engine:
        assert engine.drafters.versions() == {"default": START}
        assert served(engine, 2) == [START] * 2
        slow = answers(engine, job(PROMPTS[0], 10, sampling=GREEDY))[0]
        name = publish(registry, EXACT)
        until(lambda: engine.drafters.versions()["default"] == name)
        fast = answers(engine, job(PROMPTS[0], 10, sampling=GREEDY))[0]
        assert fast.ids == slow.ids
        assert fast.speculation.version == name
        assert fast.speculation.accepted > slow.speculation.accepted
        assert same(engine.drafters.routes["default"].proposer.weights(), EXACT)
        counters = engine.counters()
        assert (counters.swaps, counters.refused_versions) == (1, 0)
        assert 0 < counters.last_swap_seconds < 1
        assert {version for _, version in counters.drafters} == {START, name}


def test_without_a_drafter_answers_are_the_targets_and_there_is_nothing_to_follow() -> None:
    jobs = [job(prompt, 12, sampling=GREEDY) for prompt in PROMPTS]
    with serving() as engine:
        expected = [client.ids for client in answers(engine, *jobs)]
    for proposer in ("unigram", "bigram", "prompt_lookup", "ngram", "none"):
        with serving(TARGET, lambda: pytest.fail("loaded"), proposer=proposer) as engine:
            assert [client.ids for client in answers(engine, *jobs)] == expected, proposer


def test_a_row_in_flight_goes_on_with_the_new_weights(registry: Registry) -> None:
    long = job(PROMPTS[0], 60, sampling=GREEDY)
    with serving(registries={"default": registry}, started=False) as engine:
        alone, swapped = _stepped(engine, long), _stepped(engine, long, registry)
    assert swapped.ids == alone.ids
    assert swapped.speculation.version == "v000001"
    assert swapped.speculation.rounds < alone.speculation.rounds


def _stepped(engine: Engine, one: Job, registry: Registry | None = None) -> Client:
    (client,) = ask(engine, one)
    for number in range(200):
        if client.ended.is_set():
            break
        if number == 3 and registry is not None:
            publish(registry, EXACT)
            engine.drafters.poll()
        engine._step()
    return client.wait()


def corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")


EMBEDDINGS = "model.embed_tokens.weight"
reshaped = write(WEIGHTS | {EMBEDDINGS: WEIGHTS[EMBEDDINGS][:-1]})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(corrupt, "cannot be read"), (reshaped, "the drafter's [258, 64]")],
    ids=["corrupt", "reshaped"],
)
def test_what_does_not_fit_is_refused_told_and_serving_goes_on(
    broken: Any, reason: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    first = publish(registry, WEIGHTS)
    with serving(registries={"default": registry}) as engine:
        bad = registry.publish(broken, metrics={}).name
        until(lambda: engine.counters().refused_versions == 1)
        assert served(engine, 8) == [first] * 8
        assert same(engine.drafters.routes["default"].proposer.weights(), WEIGHTS)
        good = publish(registry, EXACT)
        until(lambda: engine.drafters.versions()["default"] == good)
        assert engine.counters().refused_versions == 1  # once, however often it is looked at
        assert engine.healthy()
    assert f"version {bad} is refused, {first} goes on" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"pard_token": 7}, "pard_token"), ({"rope_parameters": {"rope_theta": 500.0}}, "rope_theta")],
)
def test_a_version_that_computes_otherwise_with_like_weights_is_refused(
    changes: dict[str, Any],
    reason: str,
    registry: Registry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def published(**others: Any) -> str:
        def whole(folder: Path) -> None:
            write(EXACT)(folder)
            stored = DRAFT.model.config.to_dict() | {"use_cache": False} | others
            write_json(folder / "config.json", stored)

        return registry.publish(whole, metrics={}).name

    first = publish(registry, WEIGHTS)
    route = route_of("default", draft, registry)
    drafters = Drafters([route])
    drafters.attach(Decoder(TARGET, slots=1, capacity=8))
    drafters.poll()
    route.shape = DRAFT.model.config
    bad = published(**changes)
    drafters.poll()
    assert drafters.versions() == {"default": first}
    assert f"version {bad} is refused, {first} goes on" in caplog.text
    assert reason in caplog.text
    good = published()
    drafters.poll()
    assert drafters.versions() == {"default": good}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_read_error_that_passes_delays_a_version_and_nothing_else(
    registry: Registry,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What cannot be read at the moment is tried again; what is damaged is refused for good."""
    first = publish(registry, WEIGHTS)
    route = route_of("default", draft, registry)
    drafters = Drafters([route])
    drafters.attach(Decoder(TARGET, slots=1, capacity=8))
    drafters.poll()
    second, read, left = publish(registry, EXACT), Path.read_bytes, [1, 2, 3]

    def failing(path: Path) -> bytes:
        if left and path.parent.name == second:
            left.pop()
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    for _ in range(3):
        drafters.poll()
        assert drafters.versions() == {"default": first}
    assert left == []
    drafters.poll()
    assert drafters.versions() == {"default": second}
    assert same(route.proposer.weights(), EXACT)
    assert drafters.refused == 0
    assert caplog.text.count("cannot be followed") == 1
    assert os.strerror(number) in caplog.text


def lossy_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights read back other than they were written."""
    draft: Any = engine.drafters.routes["default"].proposer.draft
    load = draft.load_weights

    def failing(state_dict: dict[str, Tensor]) -> None:
        load(state_dict)
        if not same(state_dict, WEIGHTS):
            draft.weights()["model.norm.weight"][5] += 1

    monkeypatch.setattr(draft, "load_weights", failing)


def no_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy fails."""
    swap, calls = engine.decoder.swap, []

    def failing(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        swap(*arguments)

    monkeypatch.setattr(engine.decoder, "swap", failing)


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [(lossy_memory, "read back other than they were written"), (no_memory, "no memory")],
)
def test_weights_that_do_not_arrive_are_taken_back(
    breaks: Any,
    reason: str,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = publish(registry, WEIGHTS)
    with serving(registries={"default": registry}) as engine:
        breaks(engine, monkeypatch)
        publish(registry, EXACT)
        until(lambda: engine.counters().refused_versions == 1)
        assert served(engine, 4) == [first] * 4
        assert same(engine.drafters.routes["default"].proposer.weights(), WEIGHTS)
        assert engine.counters().swaps == 1
        assert engine.healthy()
    assert reason in caplog.text


def test_routes_have_their_own_drafters(tmp_path: Path) -> None:
    registries = {name: Registry(tmp_path, name) for name in ("default", "code")}
    with serving(registries=registries) as engine:
        name = publish(registries["code"], EXACT)
        until(lambda: engine.drafters.versions()["code"] == name)
        assert engine.drafters.versions() == {"default": START, "code": name}
        assert served(engine, 2) == [START] * 2
        assert served(engine, 2, route="code") == [name] * 2
        assert set(engine.counters().drafters) == {("default", START), ("code", name)}
