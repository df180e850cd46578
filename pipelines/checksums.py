"""What the user names, with a checksum of its content: models and texts.

A local file or folder is read once: its checksum is remembered by path, inode, size and times in
`<root>/shared/checksums.json`, which may be deleted.
"""

import importlib.metadata
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from draftkit.artifacts import fingerprint, remembered, sha256_file
from draftkit.config import DataConfig, ModelConfig
from draftkit.data.installed import OPTIONAL, PACKAGES
from draftkit.models.files import commit_of, files_of_model, model_sha256
from draftkit.models.loading import check_folder

from .plan import MEMORY, Given

# Where a package is called otherwise than what is imported.
DISTRIBUTIONS = {"hydra": "hydra-core", "PIL": "pillow"}


def given_model(model: ModelConfig, key: str, root: str) -> Given:
    """The model of a section that names one; of the hub, its name and the commit of its revision.

    Raises ValueError naming `key` where there is no model.
    """
    assert model.path is not None
    check_folder(model, key)
    folder, code = Path(model.location), model.trust_remote_code
    if folder.is_dir():
        files, checksum = files_of_model(folder, code=code), partial(model_sha256, code=code)
        return Given(remembered(folder, Path(root) / MEMORY, checksum, files), model.location)
    return Given(f"{model.path}@{commit_of(model)}", model.path)


def given_text(data: DataConfig, root: str) -> Given:
    """What `data` names: a file's content, or the versions of the packages that are read.

    Raises ValueError for a missing file.
    """
    if data.name == "local":
        path = Path(str(data.path))
        if not path.is_file():
            raise ValueError(f"data.path {path}: no such file")
        return Given(remembered(path, Path(root) / MEMORY, sha256_file, [path]), str(path))
    if data.name == "hub":
        return Given(fingerprint([data.path, data.subset, data.split]), str(data.path))
    return Given(fingerprint([sys.version, sorted(versions_read().items())]))


def versions_read() -> dict[str, str | None]:
    """The versions of the packages that `installed` text is read of; None for a missing one."""
    # Not of all distributions in sight: compiling, for one, brings more of them into sight.
    names = [DISTRIBUTIONS.get(package, package) for package in (*PACKAGES, *OPTIONAL)]
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
