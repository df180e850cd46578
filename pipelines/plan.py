"""What a command is going to do: its steps, in order, each with its folder, settings and inputs.

A step is one stage under one configuration. Its address is a fingerprint of its settings and of
its inputs' addresses, as in Nix; what the user names has a checksum of its content for an address.
So a plan is known before anything is made. Making one runs no step, loads no model and writes
nothing but remembered checksums, which may be deleted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftkit.artifacts import fingerprint, read_json, remembered
from draftkit.config import Config, ModelConfig, flatten
from draftkit.distillation.ranks import processes
from draftkit.evaluation.walltime import now
from draftkit.models.files import files_of_model, model_sha256
from draftkit.tracking import Tracker

MANIFEST, SUMMARY = "manifest.json", "summary.json"
VERSION = "draftkit's version of the stage"
MEMORY = Path("shared") / "checksums.json"  # below the root: remembered checksums
NEVER_COUNT = ("name", "root", "job", "overwrite", "plan", "limit", "runs", "hardware", "tracker")


@dataclass(frozen=True)
class StageFolder:
    """What a stage is given: its folder, its tracker, and what it needs by name, made by now.

    `resumed`: an interrupted run began there. `is_main` is false on the other processes of a
    distributed launch: they read and never write. marks: moments by a clock that stands still while
    code compiles.
    """

    path: Path
    tracker: Tracker
    resumed: bool = False
    is_main: bool = True
    stage: str = ""
    needs: "Mapping[str, Given | Step]" = field(default_factory=dict)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def mark(self, moment: str) -> None:
        """Record when the stage came so far: what the dry run tells its parts apart by."""
        self.marks.append((moment, now()))

    def note(self, text: str) -> None:
        """Print one line to the person who started the stage; a mark too."""
        self.mark(text)
        if self.is_main:
            print(f"{self.stage}: {text}" if self.stage else text, flush=True)

    def input(self, name: str) -> Path:
        """Where the product of the input `name` lies."""
        return Path(self.needs[name].path)

    def model(self, config: Config, key: str) -> Any:
        """The model of section `key` (`target` or `draft`): as it is given, or as it was made.

        One of the hub at the commit that the plan has seen, whatever is uploaded since.
        """
        section: ModelConfig = getattr(config, key)
        if section.path is None:
            return replace(section, path=self.needs[key].path, revision=None)
        name, _, commit = self.needs[key].digest.rpartition("@")
        return replace(section, revision=commit) if name == section.path else section


Run = Callable[[Config, StageFolder], dict[str, Any]]


@dataclass(frozen=True)
class Given:
    """An input that is not made here: a model or a text that the user names.

    `address`: a checksum of its content. `path`: where it is read; a hub name for one of the hub.
    """

    address: str
    path: str = ""

    @property
    def digest(self) -> str:
        return self.address


@dataclass(frozen=True, eq=False, kw_only=True)
class Recipe:
    """How one kind of step is made; the stages of `run` are such.

    `sections`: dotted prefixes of the settings that the product depends on (`optim`,
    `target.pretrain`, `seed`); those of `NEVER_COUNT` cannot be. `needs(config)`: inputs by name,
    steps or what is given; it makes nothing. `shared`: one folder for all experiments. `product`:
    the part of the folder that other steps read: empty for all of it, None where no step reads
    any. `everywhere`: all processes of a launch take part; else the first one makes it and the
    others wait. `command`: the one that redoes it, by default its own. `check(config)` raises
    ValueError for what can be refused before any step runs, `check_texts(config, folder)` for what
    can be as soon as the input `texts` lies in `folder`; it returns what is to be printed.
    `discard(folder)` deletes what only an interrupted run needs, once the folder is complete.
    `after(config, folder)`: what the command does then, also when it already was. `within(config)`:
    a folder of the experiment in which the step lies, where one experiment has several of its kind;
    empty for none.

    `version`: part of the identity too. Raise it by 1 in every change after which the same settings
    and inputs give another product (tokens, splits, noise, what a number of the summary means), so
    that nobody is handed the old one as if it were the new: shared products get another address, an
    experiment's folder is refused as with other settings. Speed, wording and keys that are added
    leave it as it is. What depends on the stage needs no new number for it.
    """

    name: str
    run: Run
    sections: Sequence[str]
    version: int = 1
    needs: "Callable[[Config], Mapping[str, Given | Step]]" = lambda config: {}
    shared: bool = False
    product: str | None = ""
    everywhere: bool = False
    command: str = ""
    check: Callable[[Config], None] | None = None
    check_texts: Callable[[Config, Path], str] | None = None
    discard: Callable[[Path], None] | None = None
    after: Callable[[Config, Path], None] | None = None
    within: Callable[[Config], str] = lambda config: ""

    def __post_init__(self) -> None:
        known = flatten(Config())
        for section in self.sections:
            counted = section.split(".")[0] not in NEVER_COUNT
            assert counted, f"{section} is never part of a stage's identity"
            assert any(is_below(key, section) for key in known), f"no setting begins with {section}"

    def step(self, config: Config) -> "Step":
        """The stage under `config`, with all that it needs; nothing is made.

        Raises ValueError for settings that do not fit together.
        """
        return Step(self, config)


class Step:
    """One stage under one configuration, and the settings that the product depends on."""

    def __init__(self, stage: Recipe, config: Config) -> None:
        self.stage = stage
        self.config = config
        settings = {
            key: value
            for key, value in flatten(config).items()
            if any(is_below(key, section) for section in stage.sections)
        }
        self.settings: dict[str, Any] = settings
        self.needs = dict(stage.needs(config))
        self.name, self.command = stage.name, stage.command or stage.name

    @cached_property
    def address(self) -> str:
        """Fingerprint of stage, settings and the addresses of all inputs."""
        parts = {"settings": self.settings, "needs": self.addresses}
        return fingerprint({"stage": self.name, "version": self.stage.version, **parts})

    @cached_property
    def folder(self) -> Path:
        """`<root>/shared/<stage>/<address>`, or `<root>/<experiment>/[<sweep job>/]<stage>`.

        `Recipe.within` stands beside the name of a sweep's job, with a comma between them.
        """
        root = Path(self.config.root)
        if self.stage.shared:
            return root / "shared" / self.name / self.address
        job = ",".join(filter(None, (self.config.job, self.stage.within(self.config))))
        return root / self.config.name / job / self.name

    @property
    def path(self) -> str:
        """Where other steps read the product."""
        return str(self.folder / (self.stage.product or ""))

    @property
    def digest(self) -> str:
        """The checksum of the product; empty where it is not complete.

        That of a model is taken again if its files were changed by hand since, as of a given one.
        """
        if not (self.folder / SUMMARY).is_file():
            return ""
        if self.stage.product and Path(self.path).is_dir():
            return self.model_digest()
        return read_json(self.folder / MANIFEST).get("product", "")

    def model_digest(self) -> str:
        """The checksum of the model that is the product."""
        model = Path(self.path)
        memory = Path(self.config.root) / MEMORY
        return remembered(model, memory, model_sha256, files_of_model(model))

    @property
    def inputs(self) -> dict[str, str]:
        """Checksums of all inputs by name, empty ones for what is yet to be made."""
        return {name: need.digest for name, need in self.needs.items()}

    @property
    def addresses(self) -> dict[str, str]:
        return {name: need.address for name, need in self.needs.items()}


def is_below(key: str, section: str) -> bool:
    """Whether the dotted `key` is `section` or lies in it."""
    return key == section or key.startswith(f"{section}.")


def own_manifest(step: Step) -> dict[str, Any] | None:
    """What the stage has recorded of the folder; None where it has to begin.

    Raises ValueError naming a file, where another program or stage wrote it.
    """
    path = step.folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    if isinstance(manifest, dict) and manifest.get("stage") == step.name:
        if "settings" in manifest:
            return manifest
        if manifest.get("cleared") is True:
            return None
    raise foreign(step, MANIFEST)


def stored_manifest(step: Step) -> dict[str, Any] | None:
    """As `own_manifest`. Raises ValueError naming the keys, if the settings are other ones too."""
    manifest = own_manifest(step)
    if manifest is None:
        return None
    stored = {**manifest["settings"], VERSION: manifest.get("version", 1)}
    wanted = {**step.settings, VERSION: step.stage.version}

    def shown(settings: Mapping[str, Any], key: str) -> str:
        return repr(settings[key]) if key in settings else "(not known)"

    if differences := [
        f"{key} was {shown(stored, key)}, now {shown(wanted, key)}"
        for key in {**wanted, **stored}
        if stored.get(key) != wanted.get(key)
    ]:
        raise ValueError(
            f"{step.folder} was made with other settings ({'; '.join(differences)}): use name=..."
            f" for another experiment, or `draftkit {step.command} ..."
            " overwrite=true` to redo this one"
        )
    return manifest


def refuse_other_processes(step: Step) -> None:
    """Raise ValueError where another number of processes has begun to make the product.

    Each brings rows of its own to a training step, so another number is another training. It is no
    part of the identity: one process evaluates, exports and serves what eight have trained.
    """
    manifest, launched = own_manifest(step), processes()
    before = launched if manifest is None else manifest.get("processes", launched)
    if before != launched:
        raise ValueError(
            f"{step.folder} was made with {before} processes, and this launch has {launched}, whose"
            f" steps have other rows: launch {before}, use name=... for another experiment, or"
            f" `draftkit {step.command} ... overwrite=true` to redo this one"
        )


def foreign(step: Step, name: str) -> ValueError:
    """The refusal of a folder that holds files of another program, such as `name`."""
    return ValueError(
        f"{step.folder} holds files that no {step.name} stage wrote ({name}, ...):"
        " move them away, or use name=..."
    )


def changed_inputs(step: Step, manifest: Mapping[str, Any]) -> list[str]:
    """The inputs that are not those of `manifest`, or whose content is not known.

    A shared product may have been deleted since: then it is the same if its address is.
    """
    stored, addresses = manifest["inputs"], manifest.get("addresses", {})

    def same(name: str, need: Given | Step) -> bool:
        if need.digest:
            return stored.get(name) == need.digest
        return isinstance(need, Step) and need.stage.shared and addresses.get(name) == need.address

    changed = [name for name, need in step.needs.items() if not same(name, need)]
    return changed + [name for name in stored if name not in step.needs]


def complete_summary(step: Step) -> dict[str, Any] | None:
    """The summary, if the step is complete and its inputs are the present ones.

    Raises ValueError as `stored_manifest` does, for the step and the experiment's own inputs.
    """
    manifest = stored_manifest(step)
    summary = step.folder / SUMMARY
    if manifest is None or not summary.is_file():
        return None
    for need in step.needs.values():
        if isinstance(need, Step) and not need.stage.shared and complete_summary(need) is None:
            return None
    return None if changed_inputs(step, manifest) else read_json(summary)


def ordered(goals: Iterable[Step]) -> list[Step]:
    """The goals and all that they need, each once, inputs before what is made of them."""
    steps: dict[Path, Step] = {}

    def visit(step: Step) -> None:
        if step.folder not in steps:
            for need in step.needs.values():
                if isinstance(need, Step):
                    visit(need)
            steps[step.folder] = step

    for goal in goals:
        visit(goal)
    return list(steps.values())


def pending(goals: Iterable[Step], redo: str = "") -> list[Step]:
    """The steps that have to run for `goals`, in order; those of the command `redo` in any case.

    What only complete steps need is left as it is, deleted or not. A complete step waits for an
    input that is redone, which may turn out the same. Raises ValueError as `complete_summary` does.
    """
    required: dict[Path, bool] = {}

    def visit(step: Step) -> bool:
        if step.folder not in required:
            needs = [need for need in step.needs.values() if isinstance(need, Step)]
            complete = step.command != redo and complete_summary(step) is not None
            visited = [visit(need) for need in needs if not (complete and need.stage.shared)]
            required[step.folder] = not complete or any(visited)
            if required[step.folder] and complete:
                for need in needs:
                    visit(need)
        return required[step.folder]

    goals = list(goals)
    for goal in goals:
        visit(goal)
    return [step for step in ordered(goals) if required.get(step.folder)]


def table(goals: Iterable[Step], to_do: Iterable[Step]) -> str:
    """The plan in lines of step, state and folder below the root."""
    goals, waiting = list(goals), {step.folder for step in to_do}
    steps = ordered(goals)
    width = max((len(step.name) for step in steps), default=0)

    def state(step: Step) -> str:
        if step.folder in waiting:
            return "to do"
        return "complete" if (step.folder / SUMMARY).is_file() else "not needed"

    def line(step: Step) -> str:
        below = step.folder.relative_to(step.config.root)
        return f"  {step.name:<{width}}  {state(step):<10}  {below}"

    return "\n".join(map(line, steps))
