"""From `conf/` and the command line to a `Config`, or to one line that says what is wrong.

Hydra composes, the dataclasses of `draftkit/config` are the schema. This module knows no stage
and no folder. A composed configuration that has an unknown key (Hydra lets `+section.key=value`
add one), a value still to be given or a value out of range never leaves it. A choice marks a value
that must be given by an empty text: Hydra drops `???` in a group that has a schema.

A `Config` holds the sampling that came out, wherever `sampling.from` took it from. The other keys
of `sampling` are null until they are set, so that a value that was set beside the model's differs
from a default.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from draftkit.config import (
    DIVERGENCE_NAMES,
    MAPPINGS,
    MIXTURE,
    SAMPLING_FROM,
    SOURCE_NAMES,
    Config,
    SamplingConfig,
    check_value,
    flatten,
    known_settings,
)
from draftkit.distillation.ranks import is_first

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
SAMPLING, FROM = "sampling", "from"
TEXTS = (str, str | None, list[str])  # types of settings whose value is read as it was typed
OVERRIDE = re.compile(r"[^-].*=|~")  # a word that is neither an option nor its value
# What the name of a sweep's job leaves out, and what the folder of the jobs is called after.
UNNAMED = "hydra.job.config.override_dirname.exclude_keys"
FOLDER = ("name", "root", "experiment")
# Groups of one key: `divergence=jsd` is `divergence.name=jsd`. A mixture has weights beside it.
NAMED = {"divergence": DIVERGENCE_NAMES, "source": SOURCE_NAMES}
EVEN = {"name": MIXTURE, MIXTURE: {"forward_kl": 0.5, "tvd": 0.5}}


@cache
def register_schema() -> None:
    """Store the schema where the defaults list of `conf/config.yaml` looks for it, and `NAMED`.

    In YAML `${by_device:A,B}` is A on a GPU and B on a CPU.
    """
    store = ConfigStore.instance()
    unset = {FROM: SAMPLING_FROM.default, **dict.fromkeys(vars(SamplingConfig()))}
    store.store(name="schema", node={**vars(Config()), SAMPLING: unset})
    for group, names in NAMED.items():
        for name in names:
            store.store(group=group, name=name, node={"name": name})
    store.store(group="divergence", name=MIXTURE, node=EVEN)
    OmegaConf.register_new_resolver("by_device", _by_device, replace=True)


def _by_device(on_gpu: Any, on_cpu: Any, *, _root_: DictConfig) -> Any:
    import torch

    device = _root_.hardware.device
    return (
        on_gpu if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else on_cpu
    )


def groups() -> list[str]:
    return sorted([*NAMED, *(path.name for path in CONF_DIR.iterdir() if path.is_dir())])


def _did_you_mean(wrong: str, known: list[str]) -> str:
    """`: did you mean X?`, or nothing: a key like it, or one with a like end."""
    if close := difflib.get_close_matches(wrong, known, n=1, cutoff=0.6):
        return f": did you mean {close[0]}?"
    by_end = {key.rpartition(".")[2]: key for key in reversed(known)}
    ends = difflib.get_close_matches(wrong.rpartition(".")[2], by_end, n=1, cutoff=0.7)
    return f": did you mean {by_end[ends[0]]}?" if ends else ""


def _unknown_key(key: str) -> str:
    hint = _did_you_mean(key, [*groups(), *known_settings()])
    return f"there is no setting {key}{hint or ': `draftkit settings` lists all'}"


def to_config(composed: DictConfig) -> Config:
    """The typed, validated `Config` of a composed configuration.

    A model of a GGUF file is one of a folder from here on, which is made where it is missing. With
    `sampling.from=model` the sampling is that of the target's generation_config.json. Both are
    printed. Raises ValueError, one line, naming the key that is unknown, not given or out of range,
    or the file that cannot be read.
    """
    content: Any = OmegaConf.to_container(composed, resolve=True)
    known, values = known_settings(), flatten(content)
    for key in values:  # Hydra adds what has a plus
        if key not in known:
            raise ValueError(_unknown_key(key))
    missing = [key for key, value in values.items() if value in ("", MISSING)]
    if missing:
        wanted = " ".join(f"{key}=..." for key in missing)
        raise ValueError(f"{', '.join(missing)} must be given: add {wanted}")
    given = {key: value for key, value in content[SAMPLING].items() if value is not None}
    origin = given.pop(FROM, SAMPLING_FROM.default)
    check_value(f"{SAMPLING}.{FROM}", SAMPLING_FROM, origin)
    typed = OmegaConf.merge(OmegaConf.structured(Config), {**composed, SAMPLING: given})
    config = OmegaConf.to_object(typed)
    assert isinstance(config, Config)
    raw = flatten(OmegaConf.to_container(composed, resolve=False))
    follow = [key for key, value in raw.items() if str(value).startswith("${by_device:")]
    chosen = ", ".join(f"{key}={values[key]}" for key in follow)
    lines = [chosen and f"on this machine, where nothing else is given: {chosen}"]
    models = (config.target, config.draft)
    if any(model.names_gguf for model in models) or config.target.weights != "auto":
        from .product import rounded, unpacked  # which import torch, as `served` does

        for key in ("target", "draft"):
            model, line = unpacked(getattr(config, key), config.root)
            config, lines = replace(config, **{key: model}), [*lines, line]
        target, line = rounded(config.target, config.root)
        config, lines = replace(config, target=target), [*lines, line]
    if origin == "model":
        from draftkit.models.served import served_sampling

        set_here = {key: getattr(config.sampling, key) for key in given}
        sampling, line = served_sampling(config.target, set_here)
        config, lines = replace(config, sampling=sampling), [*lines, line]
    if is_first():
        for line in filter(None, lines):
            print(line, flush=True)
    return config


def spelled_out(words: Sequence[str]) -> list[str]:
    """The overrides `words` as Hydra needs them.

    `draft.path` chooses `draft=local`, a plain drafter: what is given is not made, and such a one
    reads no hidden states. A setting that is a mapping takes new keys, which Hydra adds or replaces
    with two plusses alone. The jobs of a sweep are named by what is not the same in all of them.
    """
    swept = any(word in ("-m", "--multirun") for word in words)
    words = [_as_typed(word, swept=swept) for word in words]
    words = [f"++{word}" if word.startswith(MAPPINGS) else word for word in words]
    given = any(word.startswith("draft.path=") and word != "draft.path=null" for word in words)
    # What is added stands in front, as options may stand behind.
    if given and not any(word.startswith(("draft=", "+draft=")) for word in words):
        cleared = ("draft.shrink.layers=[]", "draft.shrink.vocabulary=0")
        words = ["draft=local", *cleared, "generate.hidden_states=false", *words]
    if swept:
        overrides = OverridesParser.create().parse_overrides([*filter(OVERRIDE.match, words)])
        fixed = [one.key_or_group for one in overrides if not one.is_sweep_override()]
        words = [f"{UNNAMED}=[{','.join([*FOLDER, *fixed])}]", *words]
    return words


def _as_typed(word: str, *, swept: bool) -> str:
    """`word` with its value in quotes where Hydra has no reading of it, or none as text.

    In a list, and in what a sweep goes through, such entries get quotes of their own.
    """
    key, equals, value = word.partition("=")
    setting, known = key.lstrip("+"), known_settings()
    kind = known[setting].type if setting in known else None
    text = kind in TEXTS or setting.startswith("certify.")
    unknown = kind is None and not setting.startswith(MAPPINGS)
    if not equals or unknown or _is_read(word, text=text, swept=swept):
        return word
    listed = value.startswith("[") and value.endswith("]")
    entries = value.strip("[]").split(",") if listed or swept else [value]
    joined = ",".join(
        one if _is_read(f"x={one}", text=text) else QuotedString(one, Quote.single).with_quotes()
        for one in entries
    )
    return f"{key}=[{joined}]" if listed else f"{key}={joined}"


def _is_read(word: str, *, text: bool, swept: bool = False) -> bool:
    """Whether Hydra reads `word`, and where a setting is `text`, as text."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    if override.is_sweep_override() and not swept:
        return not text
    value = override.value()
    values = value if isinstance(value, list) else getattr(value, "list", None) or [value]
    return not text or not any(isinstance(one, int | float) for one in values)


def compose_settings(overrides: Sequence[str]) -> DictConfig:
    """What Hydra makes of a command line, before anything of it is validated or read."""
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("config", overrides=spelled_out(overrides))


def compose_config(overrides: Sequence[str] = ()) -> Config:
    """The `Config` of a command line without starting Hydra's application: tests, notebooks.

    Raises ValueError, one line, for whatever the command line would be refused for.
    """
    try:
        return to_config(compose_settings(overrides))
    except COMPOSITION_ERRORS as error:
        raise ValueError(explain(error)) from error


def explain(error: BaseException) -> str:
    """An error of Hydra, OmegaConf or YAML in one line: as they say it, with the near match."""
    text, cause = str(error), error.__cause__
    file = re.match(r"In '([^']+)': .* raised while composing config:", text)
    where = f"{file[1]}.yaml: " if file else ""
    reason = str(cause) if isinstance(cause, OmegaConfBaseException) else text
    full = re.search(r"full_key: (\S+)", reason)
    key = full[1] if full else ""
    if re.search(r"Key '.+' (?:is )?not in", reason):
        typed = re.search(r"Could not override '([^']+)'", text)
        return where + _unknown_key(max(key, typed[1] if typed else "", key=len))
    if options := getattr(error, "options", None):  # of a group, where a choice is none
        wrong = str(getattr(error, "missing_cfg_file", "")).rpartition("/")[2]
        reason = reason.replace("\n", f"{_did_you_mean(wrong, options)}\n", 1)
    reason = re.split(r"\n *full_key:|\nConfig search path:", reason)[0]
    return where + (f"{key}: " if key else "") + " ".join(reason.split())
