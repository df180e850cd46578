"""Versions come into force between rounds, are tried, judged, and refused where they do not fit."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftkit.config import DRAFTED_NAMES, GateConfig
from draftkit.models.adapter import Adapter
from draftkit.online.registry import Registry
from draftkit.serving.drafters import START, Drafters
from draftkit.serving.engine import Engine
from draftkit.serving.weights import same
from tests import tiny
from tests.serving.running import (
    GREEDY,
    Shelf,
    Weights,
    answers,
    ask,
    job,
    route_of,
    serving,
    until,
)

TARGET, DRAFT = tiny.pair()
WEIGHTS = {name: tensor.clone() for name, tensor in DRAFT.weights().items()}
EXACT = {name: tensor.clone() for name, tensor in TARGET.weights().items()}  # accepts all
PROMPTS = tiny.prompts([5, 17, 9, 30])


def draft() -> Adapter:
    return copy.deepcopy(DRAFT)


def noisy(scale: float, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a drafter that is the worse the larger `scale`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in WEIGHTS.items()
    }


def served(engine: Engine, count: int, **others: Any) -> list[str]:
    """Serve `count` answers; the versions that drafted for them."""
    jobs = [job(PROMPTS[n % 4], 12, **others) for n in range(count)]
    clients = [c for first in range(0, count, 8) for c in answers(engine, *jobs[first : first + 8])]
    return [client.speculation.version for client in clients]


@pytest.mark.parametrize("proposer", DRAFTED_NAMES)
def test_a_version_comes_into_force_between_rounds_and_tags_what_it_drafts(proposer: str) -> None:
    shelf = Shelf()
    with serving(TARGET, draft, registries={"default": shelf}, proposer=proposer) as engine:
        assert engine.versions() == {"default": START}
        assert served(engine, 2) == [START] * 2
        slow = answers(engine, job(PROMPTS[0], 10, sampling=GREEDY))[0]
        name = shelf.publish(EXACT)
        until(lambda: engine.versions()["default"] == name)
        fast = answers(engine, job(PROMPTS[0], 10, sampling=GREEDY))[0]
        assert fast.ids == slow.ids
        assert fast.speculation.version == name
        assert fast.speculation.accepted > slow.speculation.accepted
        role = engine.drafters.routes["default"].current
        assert same(role.proposer.weights(), EXACT)
        counters = engine.counters()
        assert (counters.swaps, counters.refused_versions) == (1, 0)
        assert 0 < counters.last_swap_seconds < 1
        assert {version for _, version in counters.drafters} == {START, name}


@pytest.mark.parametrize("proposer", ["unigram", "bigram", "prompt_lookup", "ngram", "none"])
def test_without_a_drafter_answers_are_the_targets_and_there_is_nothing_to_follow(
    proposer: str,
) -> None:
    jobs = [job(prompt, 12, sampling=GREEDY) for prompt in PROMPTS]
    with serving(TARGET, draft) as engine:
        expected = [client.ids for client in answers(engine, *jobs)]
    with serving(TARGET, lambda: pytest.fail("loaded"), proposer=proposer) as engine:
        assert engine.drafters.routes["default"].candidate is None
        assert [client.ids for client in answers(engine, *jobs)] == expected


def test_the_current_version_is_in_force_before_the_first_job() -> None:
    shelf = Shelf()
    name = shelf.publish(EXACT)
    with serving(TARGET, draft, registries={"default": shelf}) as engine:
        assert engine.versions() == {"default": name}
        assert served(engine, 1) == [name]


def test_a_row_in_flight_goes_on_with_the_new_weights() -> None:
    shelf = Shelf()
    long = job(PROMPTS[0], 60, sampling=GREEDY)
    with serving(TARGET, draft, registries={"default": shelf}, started=False) as engine:
        (alone,) = [*_stepped(engine, long)]
        (swapped,) = [*_stepped(engine, long, shelf)]
    assert swapped.ids == alone.ids
    assert swapped.speculation.version == "v000001"
    assert swapped.speculation.rounds < alone.speculation.rounds


def _stepped(engine: Engine, one: Any, shelf: Shelf | None = None) -> Any:
    (client,) = ask(engine, one)
    for number in range(200):
        if client.ended.is_set():
            break
        if number == 3 and shelf is not None:
            shelf.publish(EXACT)
            engine.drafters.poll()
        engine._step()
    yield client.wait()


def broken(kind: str) -> dict[str, Tensor] | None:
    name = "model.embed_tokens.weight"
    weights = dict(WEIGHTS)
    if kind == "corrupt":
        return None
    if kind == "unknown":
        weights["of.another.model"] = torch.zeros(3)
    elif kind == "missing":
        del weights[name]
    elif kind == "reshaped":
        weights[name] = weights[name][:-1]
    elif kind == "integers":
        weights[name] = weights[name].long()
    elif kind == "not a number":
        weights[name] = weights[name].clone()
        weights[name][3, 3] = torch.nan
    return weights


KINDS = {
    "corrupt": "differs from its checksum",
    "unknown": "has no of.another.model",
    "missing": "model.embed_tokens.weight is missing",
    "reshaped": r"is \[257, 64\], the drafter's \[258, 64\]",
    "integers": "holds torch.int64",
    "not a number": "not finite",
}


@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused_told_and_serving_goes_on(
    kind: str, canary: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    first = shelf.publish(WEIGHTS)
    with serving(TARGET, draft, registries={"default": shelf}) as engine:
        bad = shelf.publish(broken(kind), canary=canary)
        until(lambda: engine.counters().refused_versions == 1)
        assert served(engine, 8) == [first] * 8
        role = engine.drafters.routes["default"].current
        assert same(role.proposer.draft.weights(), WEIGHTS)
        if canary:
            until(lambda: shelf.tried is None)
            assert shelf.told[0][:2] == ("withdraw", bad)
        good = shelf.publish(EXACT)
        until(lambda: engine.versions()["default"] == good)
        assert engine.counters().refused_versions == 1  # once, however often it is looked at
        assert engine.healthy()
    assert f"version {bad} is refused, {first} goes on" in caplog.text
    assert re.search(KINDS[kind], caplog.text)


def test_weights_that_read_back_otherwise_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    first = shelf.publish(WEIGHTS)
    with serving(TARGET, draft, registries={"default": shelf}) as engine:
        proposer = engine.drafters.routes["default"].current.proposer
        load = proposer.draft.load_weights

        def failing(state_dict: dict[str, Tensor]) -> None:
            load(state_dict)
            if not same(state_dict, WEIGHTS):
                proposer.draft.weights()["model.norm.weight"][5] += 1

        monkeypatch.setattr(proposer.draft, "load_weights", failing)
        shelf.publish(EXACT)
        until(lambda: engine.counters().refused_versions == 1)
        assert served(engine, 4) == [first] * 4
        assert same(proposer.draft.weights(), WEIGHTS)
        assert engine.counters().swaps == 1
    assert "read back other than they were written" in caplog.text


def test_a_copy_that_fails_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    first = shelf.publish(WEIGHTS)
    with serving(TARGET, draft, registries={"default": shelf}) as engine:
        swap, calls = engine.decoder.swap, []

        def failing(*arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("no memory")
            swap(*arguments)

        monkeypatch.setattr(engine.decoder, "swap", failing)
        shelf.publish(EXACT)
        until(lambda: engine.counters().refused_versions == 1)
        assert served(engine, 4) == [first] * 4
        assert engine.healthy()


def test_a_registry_out_of_reach_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    with serving(TARGET, draft, registries={"default": shelf}) as engine:
        read = shelf.read
        shelf.read = lambda _: (_ for _ in ()).throw(OSError("no such device"))
        name = shelf.publish(EXACT)
        until(lambda: "no such device" in caplog.text)
        assert served(engine, 1) == [START]
        shelf.read = read
        until(lambda: engine.versions()["default"] == name)


# Canaries

GATE = GateConfig(canary_fraction=0.5, canary_tokens=150)


def test_a_candidate_gets_its_share_of_the_rows_and_never_a_seeded_one() -> None:
    shelf = Shelf()
    first = shelf.publish(WEIGHTS)
    gate = GateConfig(canary_fraction=0.3, canary_tokens=10**9)
    with serving(TARGET, draft, registries={"default": shelf}, gate=gate, slots=8) as engine:
        served(engine, 8)
        assert engine.drafters.routes["default"].current.acceptance.positions > 0
        tried = shelf.publish(noisy(0.3), canary=True)
        until(lambda: engine.drafters.routes["default"].tries)
        # What came before was other traffic: both are judged by what they see from now on.
        assert engine.drafters.routes["default"].current.acceptance.positions == 0
        versions = served(engine, 96)
        assert 12 < versions.count(tried) < 48
        assert versions.count(first) == 96 - versions.count(tried)
        assert served(engine, 24, seed=3) == [first] * 24
        assert engine.versions() == {"default": first}
        shelf.withdraw(tried, reason="by hand")
        until(lambda: not engine.drafters.routes["default"].tries)
        assert served(engine, 24) == [first] * 24


def try_out(weights: dict[str, Tensor]) -> tuple[Shelf, str, list[str]]:
    """Serve until a candidate is judged; the shelf, its name, and who drafts afterwards."""
    shelf = Shelf()
    shelf.publish(WEIGHTS)
    with serving(TARGET, draft, registries={"default": shelf}, gate=GATE, slots=8) as engine:
        tried = shelf.publish(weights, canary=True)
        until(lambda: engine.drafters.routes["default"].tries)
        for _ in range(40):
            served(engine, 8)
            if shelf.told:
                break
        until(lambda: engine.versions()["default"] == shelf.now)
        return shelf, tried, served(engine, 16)


def test_a_good_candidate_is_promoted_and_in_force() -> None:
    shelf, tried, after = try_out(EXACT)
    assert shelf.told == [("promote", tried)]
    assert shelf.now == tried
    assert after == [tried] * 16


def test_a_bad_candidate_is_withdrawn(caplog: pytest.LogCaptureFixture) -> None:
    shelf, tried, after = try_out(noisy(3.0))
    ((event, name, reason),) = shelf.told
    assert (event, name) == ("withdraw", tried)
    assert "is below" in reason
    assert after == ["v000001"] * 16
    assert f"version {tried} goes" in caplog.text


@pytest.mark.parametrize("why", ["all rows have a seed", "nothing is proposed"])
def test_a_candidate_that_the_traffic_cannot_judge_is_withdrawn_with_the_reason(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the daemon would wait for its verdict for ever."""
    shelf = Shelf()
    shelf.publish(WEIGHTS)
    drafters = Drafters([route_of("default", draft, shelf)], GATE, draw=lambda: 0.3)
    drafters.attach(Weights())  # type: ignore[arg-type]
    drafters.poll()
    tried = shelf.publish(noisy(0.1), canary=True)
    for _ in range(2 * GATE.canary_tokens):
        assert shelf.tried == tried
        drafters.poll()
        drafters.choose("default", seeded=why == "all rows have a seed")
        drafters.observe("default", tried, tested=0, acceptance=0.0)
    drafters.poll()
    ((event, name, reason),) = shelf.told
    assert (event, name) == ("withdraw", tried)
    assert "online.gate.canary_fraction=0" in reason
    assert reason in caplog.text
    assert shelf.now == "v000001"


@pytest.mark.parametrize("good", [True, False])
def test_without_canaries_a_new_version_is_on_trial_after_the_swap(good: bool) -> None:
    shelf = Shelf()
    first = shelf.publish(WEIGHTS)
    gate = GateConfig(canary_fraction=0.0, canary_tokens=150)
    with serving(TARGET, draft, registries={"default": shelf}, gate=gate, slots=8) as engine:
        served(engine, 32)
        new = shelf.publish(EXACT if good else noisy(3.0))
        until(lambda: engine.versions()["default"] == new)
        route = engine.drafters.routes["default"]
        for _ in range(40):
            served(engine, 8)
            if route.before is None or shelf.told:
                break
        until(lambda: engine.versions()["default"] == (new if good else first))
        assert [told[:2] for told in shelf.told] == ([] if good else [("rollback", first)])
        until(lambda: route.seen == shelf.changes)
        assert route.before is None  # what was rolled back to is not on trial


def test_a_candidate_is_promoted_at_once_where_nothing_is_tried_first() -> None:
    shelf = Shelf()
    shelf.publish(WEIGHTS)
    gate = GateConfig(canary_fraction=0.0)
    with serving(TARGET, draft, registries={"default": shelf}, gate=gate) as engine:
        name = shelf.publish(EXACT, canary=True)
        until(lambda: engine.versions()["default"] == name)
        assert shelf.told == [("promote", name)]


@pytest.mark.parametrize("event", ["promote", "withdraw", "refused", "at once"])
def test_a_registry_that_cannot_be_written_is_written_later(
    event: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    shelf.publish(WEIGHTS)
    gate = GateConfig(canary_fraction=0.0) if event == "at once" else GATE
    weights = {"promote": EXACT, "at once": EXACT, "withdraw": noisy(3.0), "refused": None}
    full: list[str] = []

    def failing(name: str, **_: str) -> None:
        full.append(name)
        raise OSError(28, "No space left on device")

    with serving(TARGET, draft, registries={"default": shelf}, gate=gate, slots=8) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(shelf, "promote", failing)
            patch.setattr(shelf, "withdraw", failing)
            name = shelf.publish(weights[event], canary=True)
            for _ in range(40):
                served(engine, 8)
                if len(full) > 2:
                    break
            assert len(full) > 2
        until(lambda: shelf.tried is None)
        told = "promote" if weights[event] is EXACT else "withdraw"
        assert shelf.told[0][:2] == (told, name)
        until(lambda: engine.versions()["default"] == shelf.now)
    assert caplog.text.count("cannot be followed") == 1


def test_routes_have_their_own_drafters() -> None:
    shelves = {"default": Shelf(), "code": Shelf()}
    with serving(TARGET, draft, registries=shelves) as engine:
        name = shelves["code"].publish(EXACT)
        until(lambda: engine.versions()["code"] == name)
        assert engine.versions() == {"default": START, "code": name}
        assert served(engine, 2) == [START] * 2
        assert served(engine, 2, route="code") == [name] * 2
        assert set(engine.counters().drafters) == {("default", START), ("code", name)}


def test_without_a_registry_there_is_one_drafter() -> None:
    made: list[int] = []

    def make() -> Adapter:
        made.append(1)
        return draft()

    drafters = Drafters([route_of("default", make)], GateConfig())
    drafters.poll()
    assert len(made) == 1
    assert drafters.choose("default", seeded=False) == "default/current"


def test_stopping_does_not_wait_for_an_installation(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    shelf.publish(EXACT)
    drafters = Drafters([route_of("default", draft, shelf)], GateConfig(), poll_seconds=0.01)
    drafters.start()  # nobody installs
    until(lambda: drafters.waits)
    drafters.stop()
    assert shelf.told == []
    assert not caplog.records


def test_a_version_of_the_real_registry_comes_into_force(tmp_path: Path) -> None:
    def write(weights: dict[str, Tensor]) -> Any:
        return lambda folder: save_file(weights, folder / "model.safetensors")

    registry = Registry(tmp_path)
    first = registry.seed(write({k: v.contiguous() for k, v in WEIGHTS.items()}))
    with serving(TARGET, draft, registries={"default": registry}) as engine:
        assert engine.versions() == {"default": first.name}
        second = registry.publish(
            write({k: v.contiguous() for k, v in EXACT.items()}),
            metrics={},
            canary=False,
        )
        until(lambda: engine.versions()["default"] == second.name)
