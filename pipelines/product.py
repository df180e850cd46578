"""A stage under a configuration: what it makes, where that lies, whether it is complete.

The address of a product is a fingerprint of the settings that its stage reads and of its inputs'
addresses, as in Nix; what the user names has a checksum of its content for an address. So all is
known before anything is made. Planning loads no model and writes nothing but remembered checksums:
a local file or folder is read once, and known by path, inode, size and times from then on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from draftkit.artifacts import fingerprint, locked, read_json, remembered, sha256_file
from draftkit.config import Config, DataConfig, ModelConfig, TargetConfig, flatten
from draftkit.data.corpora import parts_at
from draftkit.distillation.ranks import agree
from draftkit.models.files import address_of, check_folder, files_of_model, model_sha256
from draftkit.models.gguf_files import VERSION as GGUF_VERSION
from draftkit.models.gguf_files import convert, file_named
from draftkit.models.loading import save_rounded
from draftkit.models.rounded import VERSION as ROUNDED_VERSION

MANIFEST, SUMMARY = "manifest.json", "summary.json"
VERSION = "draftkit's version of the stage"
MEMORY = Path("shared") / "checksums.json"  # below the root: remembered checksums
Model = TypeVar("Model", bound=ModelConfig)


@dataclass(frozen=True, eq=False)
class Input:
    """What a stage reads under a configuration: nothing, one product or several of a kind.

    The first is called `name`, the others `name 2`, `name 3`, ...
    """

    name: str
    products: "Callable[[Config], Sequence[Product]]"


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage:
    """A row of the table.

    `code`: the module of this package whose function `name` makes the product, by default the one
    of that name; `check(config)` there raises ValueError for what can be refused before anything
    runs. `reads`: dotted prefixes of the settings that the product depends on (`optim`, `seed`).
    `derived`: what it depends on that no setting says by itself;
    None does not count. `shared`: one folder for all experiments. `product`: the part of the folder
    that other stages read: empty for all of it, None where none reads any. `everywhere`: all
    processes of a launch take part; else the first one makes it and the others wait. `command`: the
    one that redoes it. `scratch`: files that only an interrupted run needs, deleted when the folder
    is complete.

    `version`: part of the identity too. Raise it by 1 in every change after which the same settings
    and inputs give another product (tokens, splits, noise, what a number of the summary means), so
    that nobody is handed the old one as if it were the new: shared products get another address, an
    experiment's folder is refused as with other settings. Speed, wording and keys that are added
    leave it as it is. What depends on the stage needs no new number for it.
    """

    name: str
    reads: Sequence[str] = ()
    inputs: "Sequence[Stage | Input]" = ()
    derived: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    version: int = 1
    shared: bool = False
    product: str | None = ""
    everywhere: bool = False
    command: str = ""
    scratch: Sequence[str] = ()
    code: Any = ""

    def products(self, config: Config) -> "Sequence[Product]":
        """As an input: the product under the same configuration."""
        return [plan(self, config)]

    def where(self, applies: Callable[[Config], bool]) -> Input:
        """The stage as an input of those configurations for which `applies`."""
        return Input(self.name, lambda config: self.products(config) if applies(config) else [])

    def under(self, configs: Callable[[Config], Iterable[Config]]) -> Input:
        """The stage as an input under other configurations than that of the reader."""
        return Input(self.name, lambda config: [plan(self, one) for one in configs(config)])


GIVEN = Stage(name="")  # of products that the user names


@dataclass(frozen=True, eq=False)
class Product:
    """What a stage makes under a configuration, or what the user names (`GIVEN`).

    `given`: the checksum of what the user names. `settings`: what the product depends on.
    """

    config: Config
    stage: Stage = GIVEN
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: "Mapping[str, Product]" = field(default_factory=dict)
    given: str = ""

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def command(self) -> str:
        """The command that redoes it."""
        return self.stage.command or self.stage.name

    @cached_property
    def address(self) -> str:
        """Fingerprint of stage, settings and the addresses of all inputs; or the checksum."""
        parts = {"settings": self.settings, "needs": self.addresses}
        parts |= {"stage": self.name, "version": self.stage.version}
        return self.given or fingerprint(parts)

    @cached_property
    def folder(self) -> Path:
        """`<root>/shared/<stage>/<address>`, or `<root>/<experiment>/[<sweep job>/]<stage>`."""
        root = Path(self.config.root)
        if self.stage.shared:
            return root / "shared" / self.name / self.address
        return root / self.config.name / (self.config.job or "") / self.name

    @property
    def path(self) -> Path:
        """Where other stages read the product."""
        return self.folder / (self.stage.product or "")

    @property
    def digest(self) -> str:
        """The checksum of the product; empty where it is not complete.

        That of a model is taken again if its files were changed by hand since, as of a given one.
        """
        if self.given or not (self.folder / SUMMARY).is_file():
            return self.given
        if self.stage.product and self.path.is_dir():
            return digest_of_model(self.path, self.config.root)
        return read_json(self.folder / MANIFEST).get("product", "")

    @property
    def digests(self) -> dict[str, str]:
        """Checksums of all inputs by name, empty ones for what is yet to be made."""
        return {name: one.digest for name, one in self.inputs.items()}

    @property
    def paths(self) -> dict[str, Path]:
        """Where all inputs lie, by name."""
        return {name: one.path for name, one in self.inputs.items()}

    @property
    def addresses(self) -> dict[str, str]:
        return {name: one.address for name, one in self.inputs.items()}

    def made(self, *, shared: bool = True) -> "list[Product]":
        """The inputs that stages make; without `shared`, of this experiment alone."""
        made = [one for one in self.inputs.values() if one.stage is not GIVEN]
        return [one for one in made if shared or not one.stage.shared]


def plan(stage: Stage, config: Config) -> Product:
    """What `stage` makes under `config`, with all that it reads; nothing is made.

    Raises ValueError for settings that do not fit together, and for what is named and not there.
    """
    settings = {
        key: value
        for key, value in flatten(config).items()
        if any(f"{key}.".startswith(f"{section}.") for section in stage.reads)
    }
    derived = {key: derive(config) for key, derive in stage.derived.items()}
    settings |= {key: value for key, value in derived.items() if value is not None}
    inputs = {}
    for one in stage.inputs:
        for number, product in enumerate(one.products(config), 1):
            inputs[one.name if number == 1 else f"{one.name} {number}"] = product
    return Product(config, stage, settings, inputs)


def foreign(product: Product, name: str) -> ValueError:
    """The refusal of a folder that holds files of another program, such as `name`."""
    return ValueError(
        f"{product.folder} holds files that no {product.name} stage wrote ({name}, ...):"
        " move them away, or use name=..."
    )


def stored_manifest(product: Product, *, overwrite: bool = False) -> dict[str, Any] | None:
    """What the stage has recorded of its folder; None where it has to begin.

    Raises ValueError naming a file that another program or stage wrote, and without `overwrite`
    naming the keys of other settings.
    """
    path = product.folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("stage") != product.name:
        raise foreign(product, MANIFEST)
    if manifest.get("cleared"):
        return None
    stored = manifest["settings"] | {VERSION: manifest["version"]}
    wanted = {**product.settings, VERSION: product.stage.version}
    differences = [
        f"{key} was {stored.get(key)!r}, now {wanted.get(key)!r}"
        for key in {**wanted, **stored}
        if stored.get(key) != wanted.get(key)
    ]
    if differences and not overwrite:
        raise ValueError(
            f"{product.folder} was made with other settings ({'; '.join(differences)}): use "
            f"name=... for another experiment, or `draftkit {product.command} ..."
            " overwrite=true` to redo this one"
        )
    return manifest


def changed_inputs(product: Product, manifest: Mapping[str, Any]) -> list[str]:
    """The inputs that are not those of `manifest`, or whose content is not known.

    A shared product may have been deleted since: then it is the same if its address is.
    """
    stored, addresses = manifest["inputs"], manifest["addresses"]

    def same(name: str, one: Product) -> bool:
        if one.digest:
            return stored.get(name) == one.digest
        return one.stage.shared and addresses.get(name) == one.address

    changed = [name for name, one in product.inputs.items() if not same(name, one)]
    return changed + [name for name in stored if name not in product.inputs]


def complete_summary(product: Product) -> dict[str, Any] | None:
    """The summary, if the product is complete and its inputs are the present ones.

    Raises ValueError as `stored_manifest` does, for it and the experiment's own inputs.
    """
    manifest, summary = stored_manifest(product), product.folder / SUMMARY
    if manifest is None or not summary.is_file():
        return None
    if any(complete_summary(one) is None for one in product.made(shared=False)):
        return None
    return None if changed_inputs(product, manifest) else read_json(summary)


def ordered(goals: Iterable[Product]) -> list[Product]:
    """The goals and all that stages make for them, each once, inputs first."""
    products: dict[Path, Product] = {}
    for goal in goals:
        if goal.folder not in products:
            for one in (*ordered(goal.made()), goal):
                products.setdefault(one.folder, one)
    return list(products.values())


def pending(goals: Iterable[Product], redo: str = "") -> list[Product]:
    """What has to be made for `goals`, in order; what the command `redo` makes in any case.

    What only complete products need is left as it is, deleted or not. A complete one waits for an
    input that is redone, which may turn out the same. Raises ValueError as `complete_summary` does.
    """
    required: dict[Path, bool] = {}

    def visit(product: Product) -> bool:
        if product.folder not in required:
            complete = product.command != redo and complete_summary(product) is not None
            visited = [visit(one) for one in product.made(shared=not complete)]
            required[product.folder] = not complete or any(visited)
            if required[product.folder] and complete:
                for one in product.made():
                    visit(one)
        return required[product.folder]

    goals = list(goals)
    for goal in goals:
        visit(goal)
    return [product for product in ordered(goals) if required.get(product.folder)]


def table(goals: Iterable[Product], to_do: Iterable[Product]) -> str:
    """The plan in lines of stage, state and folder below the root."""
    products, waiting = ordered(goals), {product.folder for product in to_do}
    width = max((len(product.name) for product in products), default=0)

    lines = []
    for product in products:
        state = "complete" if (product.folder / SUMMARY).is_file() else "not needed"
        if product.folder in waiting:
            state = "to do"
        below = product.folder.relative_to(product.config.root)
        lines.append(f"  {product.name:<{width}}  {state:<10}  {below}")
    return "\n".join(lines)


# What the user names


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

    So no stage knows of such files. The folder lies in `<root>/shared/gguf`, by the file's content,
    and is made once. Raises ValueError naming the model's key for a file that cannot be had or
    read.
    """
    if not model.names_gguf:
        return model, ""
    key = model.key
    file = file_named(str(model.path), key)
    content = remembered(file, Path(root) / MEMORY, sha256_file, [file])
    home = Path(root) / "shared" / "gguf" / fingerprint([GGUF_VERSION, content])
    folder, line = home / file.stem, f"{key}.path {model.path}: read into {home / file.stem}"
    with locked(home, wait=partial(print, flush=True)):
        if not folder.is_dir():
            line = f"{key}.path {model.path}: {convert(file, folder, key)}"
    return replace(model, path=str(folder), revision=None), line


def rounded(target: TargetConfig, root: str) -> tuple[TargetConfig, str]:
    """`target` as a folder with the weights that `target.weights` asks for, and a line about it.

    It lies in `<root>/shared/rounded`, by the checksum of what was rounded, and is made once.
    Raises ValueError as `save_rounded` does.
    """
    if target.weights == "auto":
        return target, ""
    sources = [ROUNDED_VERSION, target.weights, address_of_model(target, root)]
    home = Path(root) / "shared" / "rounded" / fingerprint(sources)
    folder, done = home / Path(target.location).name, "read from"
    with locked(home, wait=partial(print, flush=True)):
        if not folder.is_dir():
            save_rounded(target, folder)
            done = "rounded once, into"
    line = f"target.weights={target.weights}: {done} {folder}; what is served is that model's law"
    return replace(target, path=str(folder), revision=None, weights="auto"), line


def address_of_text(data: DataConfig, root: str) -> str:
    """Of what `data` names: of a file its content, of a data set its name.

    Raises ValueError for a missing file.
    """
    if data.name == "hub":
        return fingerprint([data.path, data.subset, data.split])
    if data.is_remote:  # a part never changes, and the first process says which there are
        _, parts = parts_at(str(data.path))
        parts[:] = agree(parts)
        return fingerprint([data.path, parts])
    path = data.file
    if not path.is_file():
        raise ValueError(f"data.path {path}: no such file")
    if data.is_packaged:  # small, and a plan is to leave no trace
        return sha256_file(path)
    return remembered(path, Path(root) / MEMORY, sha256_file, [path])
