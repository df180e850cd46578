"""Versions stay as published, the pointer moves as told, and damaged ones are not served."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftkit.artifacts import read_json
from draftkit.online.registry import NotInForce, Registry
from tests.online.drafters import TOLD, chain, name_of, publish, weights


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def test_nothing_is_served_before_the_seed_and_nothing_is_written(registry: Registry) -> None:
    assert (registry.current(), registry.names()) == (None, [])
    assert not registry.path.exists()


def test_the_starting_drafter_is_published_once(registry: Registry) -> None:
    first = registry.seed(weights(1))
    assert (first.name, first.parent, first.ancestors) == ("v000001", None, ())
    assert registry.seed(weights(2)) == first == registry.current()
    assert registry.read(first)["layer2"].tolist() == [[1.0, 1.0]] * 3


def test_a_version_says_what_it_is_and_never_changes(registry: Registry) -> None:
    first = registry.seed(weights(1))
    second = publish(registry, 2)
    assert (second.name, second.parent, second.ancestors) == ("v000002", "v000001", ("v000001",))
    assert second.metrics == TOLD["metrics"]
    assert sorted(second.sha256) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "tokenizer/vocabulary.json",
    ]
    assert registry.versions() == [first, second]
    assert registry.version("v000002") == second == registry.current()
    assert {name: float(t.mean()) for name, t in registry.read(first).items()} == {
        "layer1": 1.0,
        "layer2": 1.0,
    }


def test_rollback_goes_to_the_version_before_or_to_a_named_one(registry: Registry) -> None:
    chain(registry, 3)
    assert registry.rollback(reason="it fell").name == "v000002"
    pointer = {"name": "v000002", "ancestors": ["v000001"], "last": 3, "reason": "it fell"}
    assert read_json(registry.path / "current") == pointer | {"changes": registry.changes()}
    assert publish(registry, 4).ancestors == ("v000002", "v000001")  # now v000004
    assert registry.rollback("v000003", reason="after all").ancestors == ("v000002", "v000001")
    assert registry.rollback(reason="").name == "v000002"
    assert registry.rollback(reason="").name == "v000001"
    with pytest.raises(ValueError, match="no version before it; whole ones: v000001, v000002"):
        registry.rollback(reason="")
    with pytest.raises(ValueError, match="v000001 is the current version already"):
        registry.rollback("v000001", reason="")
    for wrong in ("v000099", "../../x", ""):
        with pytest.raises(ValueError, match=f"no whole version {wrong}"):
            registry.rollback(wrong, reason="")
    assert name_of(registry.current()) == "v000001"


def test_the_newest_changes_of_what_is_in_force_are_known(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.changes() == []
    monkeypatch.setattr("draftkit.online.registry.CHANGES", 3)
    clock = SimpleNamespace(time=iter(range(1, 9)).__next__)
    monkeypatch.setattr("draftkit.online.registry.time", clock)
    chain(registry, 3)
    registry.rollback("v000001", reason="it fell")
    names = (None, "v000001", "v000002", "v000003", "v000001")
    reasons = ("the starting drafter", "published", "published", "it fell")
    assert registry.changes() == [
        {"time": at + 1, "before": names[at], "name": names[at + 1], "reason": reasons[at]}
        for at in (1, 2, 3)
    ]
    path = registry.path / "current"
    earlier = {name: value for name, value in read_json(path).items() if name != "changes"}
    path.write_text(json.dumps(earlier))  # as versions before this one left it
    assert registry.changes() == []
    assert publish(registry, 9).parent == "v000001"
    assert [change["name"] for change in registry.changes()] == ["v000004"]
    path.write_text("{")
    assert registry.changes() == []


def test_what_fails_while_it_is_written_changes_nothing(registry: Registry) -> None:
    chain(registry, 2)
    before, pointer = registry.versions(), (registry.path / "current").read_bytes()

    def broken(folder: Path) -> None:
        weights(3)(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        registry.publish(broken, **TOLD)
    with pytest.raises(ValueError, match=r"no \.safetensors file was written"):
        registry.publish(lambda folder: None, **TOLD)
    with pytest.raises(NotInForce, match="made of v000077, and v000002 is in force now"):
        publish(registry, 1, parent="v000077")
    assert registry.versions() == before
    assert (registry.path / "current").read_bytes() == pointer
    assert sorted(path.name for path in (registry.path / "versions").iterdir()) == [
        "v000001",
        "v000002",
    ]
    assert publish(registry, 3).name == "v000003"


def test_names_are_never_used_twice(registry: Registry) -> None:
    registry.seed(weights(0))
    for number in (2, 3, 4):
        name = f"v{number:06d}"
        assert publish(registry, 1).name == name
        registry.rollback(reason="")
        assert registry.collect(0) == [name]
    assert registry.names() == ["v000001"]


def test_garbage_is_what_is_neither_recent_nor_an_ancestor(registry: Registry) -> None:
    chain(registry, 3)
    registry.rollback("v000001", reason="")  # 2 and 3 are of a branch that is left
    for number in range(4, 8):
        publish(registry, number)
        registry.rollback(reason="")
    publish(registry, 8)  # of 1
    publish(registry, 9)
    registry.rollback(reason="")
    publish(registry, 10)  # of 8
    (registry.path / "versions" / ".v000004.tmp-1").mkdir()
    assert registry.collect(4) == ["v000002", "v000003", "v000004", "v000005", "v000006"]
    assert registry.collect(1) == ["v000007", "v000009"]
    assert registry.collect(0) == []
    left = sorted(path.name for path in (registry.path / "versions").iterdir())
    assert left == ["v000001", "v000008", "v000010"]
    assert name_of(registry.current()) == "v000010"


def test_routes_are_apart_and_names_of_versions_are_checked(tmp_path: Path) -> None:
    one, other = Registry(tmp_path, "sql"), Registry(tmp_path, "code")
    one.seed(weights(1))
    assert other.current() is None
    for wrong in ("..", "v1", "current", "v000001/", "V000001", "v000001\n"):
        with pytest.raises(ValueError, match="is no version"):
            one.version(wrong)


def test_writers_wait_for_each_other(registry: Registry) -> None:
    registry.seed(weights(0))
    inside, most = 0, 0

    def slow(folder: Path) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        weights(1)(folder)
        threading.Event().wait(0.02)
        inside -= 1

    def work() -> None:
        for _ in range(3):
            Registry(registry.path.parent).publish(slow, **TOLD)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert registry.names() == [f"v{number:06d}" for number in range(1, 11)]
    current = registry.current()
    assert current is not None
    assert len(current.ancestors) == 9


# Damage


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:-4])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
@pytest.mark.parametrize("file", ["model-2.safetensors", "tokenizer/vocabulary.json"])
def test_weights_of_a_damaged_version_are_not_read(registry: Registry, how: str, file: str) -> None:
    version = registry.seed(weights(1))
    damage(version.path / file, how)
    with pytest.raises(ValueError, match=f"{file} of v000001 (differs|cannot be read)") as caught:
        registry.read(version)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "version.json", "folder"])
def test_a_rollback_from_damage_goes_to_the_nearest_whole_ancestor(
    registry: Registry, tmp_path: Path, how: str
) -> None:
    versions = chain(registry, 4)
    for version in versions[2:]:
        if how == "folder":
            version.path.rename(tmp_path / version.name)
        elif how == "version.json":
            damage(version.path / how, "cut")
        else:
            damage(version.path / "model-1.safetensors", how)
    with pytest.raises(ValueError, match="v000004"):
        registry.read(registry.current() or pytest.fail("nothing is in force"))
    assert registry.rollback(reason="damaged") == versions[1] == registry.current()
    # The next one is made of what is served, under a name that was never used.
    after = publish(registry, 5)
    assert (after.name, after.ancestors) == ("v000005", ("v000002", "v000001"))


@pytest.mark.parametrize(("how", "state"), [("cut", "damaged"), ("gone", "missing")])
def test_a_start_on_damage_is_refused_with_the_way_out(
    registry: Registry, how: str, state: str
) -> None:
    (version,) = chain(registry, 1)
    damage(version.path / "version.json", how)
    with pytest.raises(ValueError, match=f"version.json is {state}: roll back to another version"):
        registry.seed(weights(7))
    assert registry.names() == ["v000001"]


def test_a_start_does_not_begin_anew_for_a_read_error(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = chain(registry, 2)

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(PermissionError):
            registry.seed(weights(7))
    assert registry.seed(weights(7)) == versions[1]


def test_a_lost_pointer_is_the_newest_whole_version_again(registry: Registry) -> None:
    versions = chain(registry, 3)
    (registry.path / "current").unlink()
    assert registry.current() is None
    damage(versions[2].path / "model-1.safetensors", "cut")
    assert registry.seed(weights(7)) == versions[1] == registry.current()
    assert publish(registry, 5).name == "v000004"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{garbage",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"name": 3, "ancestors": [], "last": 3}',
        b'{"name": "v000003", "ancestors": null, "last": 3}',
        b'{"name": "v000003", "ancestors": "v000002", "last": 3}',
        b'{"name": "v000003", "ancestors": [], "last": "x"}',
        b'{"name": "../../../outside", "ancestors": ["/etc"], "last": 3}',
    ],
)
def test_a_damaged_pointer_is_refused_until_a_rollback_to_the_newest_whole_version(
    registry: Registry, content: bytes
) -> None:
    versions = chain(registry, 3)
    damage(versions[2].path / "model-1.safetensors", "flip")
    (registry.path / "current").write_bytes(content)
    way_out = "current is damaged, .* v000001 to v000003 .*: `rollback` makes the newest whole one"
    for call in (registry.current, lambda: registry.seed(weights(7))):
        with pytest.raises(ValueError, match=way_out) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert registry.names() == ["v000001", "v000002", "v000003"]
    assert registry.rollback(reason="") == versions[1] == registry.seed(weights(7))
    assert registry.rollback(reason="") == versions[0]  # as ever
    assert publish(registry, 5).name == "v000004"


def test_a_named_version_is_reached_from_a_damaged_pointer(registry: Registry) -> None:
    versions = chain(registry, 3)
    (registry.path / "current").write_bytes(b"")
    assert registry.rollback("v000001", reason="") == versions[0] == registry.current()


def test_a_pointer_leads_nowhere_but_to_versions(registry: Registry, tmp_path: Path) -> None:
    first = registry.seed(weights(0))
    outside = tmp_path / "outside"
    first.path.rename(outside)
    told = {"name": "../../../outside", "ancestors": ["/etc", "v000001/../../x"], "last": 1}
    (registry.path / "current").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="has no version yet"):
        registry.rollback(reason="")
    assert registry.seed(weights(3)).path.parent == registry.path / "versions"  # nothing was there
