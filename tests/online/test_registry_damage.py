"""What is damaged or gone is not served: the registry goes around it and says so."""

import json
import logging
from pathlib import Path

import pytest

from draftkit.online import registry as registry_module
from draftkit.online.registry import Registry
from draftkit.online.versions import is_whole
from tests.online.drafters import chain, name_of, publish, weights


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
    assert not is_whole(version)


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "version.json", "folder"])
def test_a_damaged_current_version_is_replaced_by_its_nearest_whole_ancestor(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Registry(tmp_path)
    versions = chain(writer, 4)
    assert writer.current() == versions[3]
    for version in versions[2:]:
        if how == "folder":
            version.path.rename(tmp_path / version.name)
        elif how == "version.json":
            damage(version.path / how, "cut")
        else:
            damage(version.path / "model-1.safetensors", how)
    for registry in (writer, Registry(tmp_path)):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert [registry.current() for _ in range(3)] == [versions[1]] * 3
            assert "v000004 is deleted or damaged: v000002 is served instead" in caplog.text
            assert len(caplog.records) == 1
    # The next one is made of what is served, under a name that was never used.
    after = publish(writer, 5)
    assert (after.name, after.ancestors) == ("v000005", ("v000002", "v000001"))
    assert writer.current() == after
    assert writer.rollback(reason="").name == "v000002"


def test_where_nothing_is_whole_the_start_begins_again(registry: Registry) -> None:
    for version in chain(registry, 2):
        damage(version.path / "model-1.safetensors", "flip")
    with pytest.raises(ValueError, match="v000002 and all before it are deleted or damaged"):
        registry.current()
    again = registry.seed(weights(7))
    assert (again.name, again.parent) == ("v000003", None)
    assert registry.current() == again


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"name": "v000001"}'])
def test_a_lost_pointer_is_on_the_newest_version(registry: Registry, content: str | None) -> None:
    chain(registry, 3)
    registry.rollback(reason="")
    (registry.path / "current").unlink()
    if content is not None:
        (registry.path / "current").write_text(content)
    assert name_of(registry.current()) == "v000003"
    assert registry.seed(weights(1)).name == "v000003"
    assert publish(registry, 4).ancestors == ("v000003", "v000002", "v000001")


def test_a_pointer_leads_nowhere_but_to_versions(registry: Registry, tmp_path: Path) -> None:
    first = registry.seed(weights(0))
    outside = tmp_path / "outside"
    first.path.rename(outside)
    told = {"name": "../../../outside", "ancestors": ["/etc", "v000001/../../x"], "last": 1}
    (registry.path / "current").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="deleted or damaged"):
        registry.current()


def test_checksums_are_computed_once_while_files_are_unchanged(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    whole = registry_module.is_whole
    monkeypatch.setattr(registry_module, "is_whole", lambda v: seen.append(v.name) or whole(v))
    version = registry.seed(weights(0))
    for _ in range(3):
        assert registry.current() == version
    assert seen == ["v000001"]
    damage(version.path / "model-1.safetensors", "flip")
    with pytest.raises(ValueError, match="deleted or damaged"):
        registry.current()
