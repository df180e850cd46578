"""What the user names, with a checksum of its content: models and texts.

A local file or folder is read once: its checksum is remembered by path, inode, size and times in
`<root>/shared/checksums.json`, which may be deleted. A GGUF file becomes a folder before anything
else looks at it, so that no stage knows of such files.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from draftkit.artifacts import fingerprint, locked, remembered, sha256_file
from draftkit.config import DataConfig, ModelConfig
from draftkit.models.files import address_of, files_of_model, model_sha256
from draftkit.models.gguf_files import VERSION, convert, file_named
from draftkit.models.loading import check_folder

MEMORY = Path("shared") / "checksums.json"  # below the root: remembered checksums
Model = TypeVar("Model", bound=ModelConfig)


def digest_of_model(folder: Path, root: str, *, code: bool = False) -> str:
    """The checksum of what loading reads of a model's folder, with `code` its modules too."""
    files, checksum = files_of_model(folder, code=code), partial(model_sha256, code=code)
    return remembered(folder, Path(root) / MEMORY, checksum, files)


def address_of_model(model: ModelConfig, root: str) -> str:
    """The checksum of the model that a section names; of the hub, its name and commit.

    Raises ValueError naming the model's key where there is none.
    """
    check_folder(model)
    folder = Path(model.location)
    if folder.is_dir():
        return digest_of_model(folder, root, code=model.trust_remote_code)
    return address_of(model)


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
    with locked(home, wait=partial(print, flush=True)):
        if not folder.is_dir():
            line = f"{key}.path {model.path}: {convert(file, folder, key)}"
    return replace(model, path=str(folder), revision=None), line


def address_of_text(data: DataConfig, root: str) -> str:
    """Of what `data` names: of a file its content, of a data set its name.

    Raises ValueError for a missing file.
    """
    if data.name == "hub":
        return fingerprint([data.path, data.subset, data.split])
    path = data.file
    if not path.is_file():
        raise ValueError(f"data.path {path}: no such file")
    if data.is_packaged:  # small, and a plan is to leave no trace
        return sha256_file(path)
    return remembered(path, Path(root) / MEMORY, sha256_file, [path])
