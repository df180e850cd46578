"""What is damaged or gone is not served: the registry says so, and a rollback goes around it."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftkit.online.registry import Registry
from tests.online.drafters import chain, publish, weights


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


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
