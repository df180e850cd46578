"""What identifies a model and a text: checksums that make a stage stale when they change."""

import importlib.metadata
import sys
from pathlib import Path

from draftkit.artifacts import fingerprint, sha256_file, sha256_tree
from draftkit.config import DataConfig, ModelConfig
from draftkit.data.installed import PACKAGES
from draftkit.models.loading import check_folder

CARD = "README.md"  # about a model, no part of it
DISTRIBUTIONS = {"hydra": "hydra-core"}  # where a package is called otherwise than what is imported


def model_sha256(model: ModelConfig, key: str) -> str:
    """Checksum of a local model folder; a hub name stands for itself with its revision.

    Raises ValueError naming `key` where there is no model.
    """
    assert model.path is not None
    check_folder(model, key)
    if Path(model.path).is_dir():
        return sha256_tree(model.path, skip=lambda name: name == CARD)
    return f"{model.path}@{model.revision or 'main'}"


def data_sha256(data: DataConfig) -> str:
    """Checksum of what `data` names: a file's content, or the versions that `installed` reads.

    Raises ValueError for a missing file.
    """
    if data.name == "local":
        path = Path(str(data.path))
        if not path.is_file():
            raise ValueError(f"data.path {path}: no such file")
        return sha256_file(path)
    if data.name == "hub":
        return fingerprint([data.path, data.subset, data.split])
    # Not all distributions in sight: compiling, for one, brings more of them into sight.
    names = [DISTRIBUTIONS.get(package, package) for package in PACKAGES]
    return fingerprint([sys.version, [(n, importlib.metadata.version(n)) for n in sorted(names)]])
