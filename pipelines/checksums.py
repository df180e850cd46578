"""What the user names, with a checksum of its content: models and texts.

A local file or folder is read once: its checksum is remembered by path, inode, size and times in
`<root>/shared/checksums.json`, which may be deleted. A GGUF file becomes a folder before anything
else looks at it, so that no stage knows of such files.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from draftkit.artifacts import fingerprint, remembered, sha256_file
from draftkit.config import DataConfig, ModelConfig
from draftkit.models.files import commit_of, files_of_model, model_sha256
from draftkit.models.gguf_files import VERSION, convert, file_named
from draftkit.models.loading import check_folder

from .folder import locked
from .plan import MEMORY, Given

Model = TypeVar("Model", bound=ModelConfig)


def given_model(model: ModelConfig, root: str) -> Given:
    """The model of a section that names one; of the hub, its name and the commit of its revision.

    Raises ValueError naming the model's key where there is none.
    """
    assert model.path is not None
    check_folder(model)
    folder, code = Path(model.location), model.trust_remote_code
    if folder.is_dir():
        files, checksum = files_of_model(folder, code=code), partial(model_sha256, code=code)
        return Given(remembered(folder, Path(root) / MEMORY, checksum, files), model.location)
    return Given(f"{model.path}@{commit_of(model)}", model.path)


def unpacked(model: Model, root: str) -> tuple[Model, str]:
    """`model` as a folder where its path names a GGUF file, and a line about it where it does.

    The folder lies in `<root>/shared/gguf`, by the file's content, and is made once. Raises
    ValueError naming the model's key for a file that cannot be had or read.
    """
    if not model.names_gguf:
        return model, ""
    key = model.key
    file = file_named(str(model.path), key)
    content = remembered(file, Path(root) / MEMORY, sha256_file, [file])
    home = Path(root) / "shared" / "gguf" / fingerprint([VERSION, content])
    folder, line = home / file.stem, f"{key}.path {model.path}: read into {home / file.stem}"
    with locked(home, wait=True):
        if not folder.is_dir():
            line = f"{key}.path {model.path}: {convert(file, folder, key)}"
    return replace(model, path=str(folder), revision=None), line


def given_text(data: DataConfig, root: str) -> Given:
    """What `data` names: a file by its content, a data set by its name.

    Raises ValueError for a missing file.
    """
    if data.name == "hub":
        return Given(fingerprint([data.path, data.subset, data.split]), str(data.path))
    path = data.file
    if not path.is_file():
        raise ValueError(f"data.path {path}: no such file")
    if data.is_packaged:  # small, and a plan is to leave no trace
        return Given(sha256_file(path), str(path))
    return Given(remembered(path, Path(root) / MEMORY, sha256_file, [path]), str(path))
