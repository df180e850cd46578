"""A checksum changes with what it stands for, and with nothing else."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from draftkit.config import DataConfig
from draftkit.data.installed import PACKAGES
from pipelines.checksums import DISTRIBUTIONS, data_sha256


def test_installed_text_is_that_of_the_packages_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_sha256(DataConfig())
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "other" in [d.name for d in importlib.metadata.distributions()]
    assert data_sha256(DataConfig()) == before


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_of_a_package_is_another_text(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = data_sha256(DataConfig()), importlib.metadata.version
    name = DISTRIBUTIONS.get(package, package)
    monkeypatch.setattr(
        importlib.metadata, "version", lambda asked: "0" if asked == name else version(asked)
    )
    assert data_sha256(DataConfig()) != before


def test_another_python_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = data_sha256(DataConfig())
    monkeypatch.setattr(sys, "version", "4.0")
    assert data_sha256(DataConfig()) != before


def test_a_file_is_its_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    data = DataConfig(name="local", path=str(path))
    before = data_sha256(data)
    path.touch()
    assert data_sha256(data) == before
    path.write_text("{ }")
    assert data_sha256(data) != before
