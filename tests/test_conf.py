"""Every file under conf/ composes, is reachable, holds choices only, and says how it is used."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from draftkit import config as settings
from draftkit.config import flatten
from pipelines import configuration
from pipelines.configuration import (
    CONF_DIR,
    compose_config,
    compose_settings,
    groups,
    spelled_out,
)
from pipelines.plan import CONTEXTS
from pipelines.product import plan
from tests.tabular import TabularAdapter, random_adapter

ROOT = CONF_DIR.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GIVEN = {"target": "some/target", "draft": "some/draft", "data": "some/rows.jsonl"}
FILES = sorted(path.relative_to(CONF_DIR) for path in CONF_DIR.rglob("*.yaml"))
CHOICES = [path for path in FILES if len(path.parts) == 2]
EXPERIMENTS = [path for path in CHOICES if path.parts[0] == "experiment"]
GROUPS = ["target", "draft", "data", "divergence", "source", "optim", "hardware"]


def selected(content: dict[str, Any]) -> dict[str, str]:
    """The groups that an experiment overrides."""
    entries = [entry for entry in content.get("defaults", []) if isinstance(entry, dict)]
    pairs = [pair for entry in entries for pair in entry.items()]
    return {key.removeprefix("override /"): option for key, option in pairs}


def overrides(path: Path) -> list[str]:
    """What selects the file, and the paths that it leaves to the user."""
    group, option = path.parts[0], path.stem
    chosen = [f"+experiment={option}"] if group == "experiment" else [f"{group}={option}"]
    content = read(path)
    local = [group] if content.get("path") == "" else []
    local += [name for name, option in selected(content).items() if option == "local"]
    return chosen + [f"{name}.path={GIVEN[name]}" for name in local]


@cache
def composed(*words: str) -> dict[str, Any]:
    """The settings of a command line by dotted key, as they are typed."""
    return flatten(OmegaConf.to_container(compose_settings(words), resolve=True))


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load((CONF_DIR / path).read_text(encoding="utf-8")) or {}


def leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings of a file by dotted key, without its defaults list."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in settings.MAPPINGS:
            found |= leaves(value, f"{prefix}{key}.")
        elif key != "defaults":
            found[f"{prefix}{key}"] = value
    return found


def header(path: Path) -> str:
    lines = (CONF_DIR / path).read_text(encoding="utf-8").splitlines()
    comments = []
    for line in lines:
        if not line.startswith("#"):
            break
        comments.append(line)
    return "\n".join(comments)


def as_read(word: str) -> Any:
    """The value that Hydra reads in a word of the command line."""
    value = OverridesParser.create().parse_override(word).value()
    return getattr(value, "text", value)


@pytest.mark.parametrize("setting", ["data.system", "data.path", "certify.with"])
@given(st.text("abcä'\"\\=,:;!?#$%&()[]{}~|<>@^*+-/.\n€😀 019e_", min_size=1, max_size=9))
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_text_is_what_was_typed(setting: str, typed: str) -> None:
    """But for what Hydra's own quotes, brackets and escapes say, and spaces around."""
    assume(typed == typed.strip() and not typed.startswith(("'", '"', "[", "{")))
    assume("\\" not in typed and "(" not in typed)
    (*_, word) = spelled_out([f"{setting}={typed}"])
    assert as_read(word) == typed


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("target.revision=12e4567", "12e4567"),
        ("target.revision=0012", "0012"),
        ("target.revision=true", "true"),
        ("target.revision=null", None),
        ("data.path=runs/epoch=3-step=20,v1/ä.jsonl", "runs/epoch=3-step=20,v1/ä.jsonl"),
        ("data.system='as Hydra, quotes!'", "as Hydra, quotes!"),
        ("data.path=${root}/rows.jsonl", "outputs/rows.jsonl"),
        ("runs=[outputs/epoch=3,outputs/1e3]", ["outputs/epoch=3", "outputs/1e3"]),
        ("optim.learning_rate=1e-3", 1e-3),
        ("data.template_options.day=1 Jan. 2026!", "1 Jan. 2026!"),
    ],
)
def test_a_value_is_read_as_its_setting_needs(word: str, read: Any) -> None:
    assert OmegaConf.select(compose_settings([word]), word.partition("=")[0]) == read


@pytest.mark.parametrize(
    ("word", "jobs"),
    [
        ("data.path=a/epoch=3,b/ä", ["a/epoch=3", "b/ä"]),
        ("target.revision=12e4567,abc", ["12e4567", "abc"]),
        ("optim.max_steps=10,20", [10, 20]),
    ],
)
def test_a_sweep_goes_through_values_as_typed(word: str, jobs: list[Any]) -> None:
    (*_, swept) = spelled_out(["-m", word])
    assert [getattr(value, "text", value) for value in as_read(swept).list] == jobs


@pytest.mark.parametrize("path", CHOICES, ids=str)
def test_every_value_of_a_file_arrives_in_the_config(path: Path) -> None:
    """A file that nothing selects, or a key that something else overrides, is dead."""
    group = path.parts[0]
    flat = composed(*overrides(path))
    for key, value in leaves(read(path), "" if group == "experiment" else f"{group}.").items():
        if value == "":
            assert flat[key] == GIVEN[group]
        elif not str(value).startswith("${"):
            assert flat[key] == (float(value) if isinstance(flat[key], float) else value)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_is_told_can_be_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for command in set(
        re.findall(r"(?m)(?:python -m pipelines\.|^ +draftkit )([a-z]\w+(?:\.[a-z]\w+)?)", text)
    ):
        code = (ROOT / "pipelines" / f"{command.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert '\nif __name__ == "__main__":\n' in code, command


def test_the_files_are_one_primary_config_and_choices_of_known_groups() -> None:
    assert [path for path in FILES if path not in CHOICES] == [Path("config.yaml")]
    assert sorted([*GROUPS, "experiment"]) == groups()
    assert all(path.suffix == ".yaml" for path in CONF_DIR.rglob("*") if path.is_file())


@pytest.mark.parametrize("word", ["divergence=jsd", "source=block"])
def test_a_group_of_names_sets_the_name(word: str) -> None:
    assert composed(word) == composed(word.replace("=", ".name="))
    assert composed(word) != composed()


def test_a_mixture_is_named_by_its_weights_alone() -> None:
    assert compose_config(["divergence=mixture"]).divergence.terms == {
        "forward_kl": 0.5,
        "tvd": 0.5,
    }
    for word in ("divergence.mixture={jsd: 2}", "divergence.mixture.jsd=2"):
        mixed = compose_config(["divergence=tvd", word]).divergence
        assert (mixed.name, mixed.terms) == ("mixture", {"jsd": 2})


def test_the_names_in_the_config_are_the_keys_of_the_dicts() -> None:
    from draftkit.decoding.catalogue import PROPOSERS
    from draftkit.theory.divergences import DIVERGENCES
    from draftkit.theory.verification import VERIFIERS

    assert [*DIVERGENCES] == [*settings.DIVERGENCE_NAMES]
    assert [*VERIFIERS, settings.TYPICAL] == [*settings.VERIFICATION_NAMES]
    assert [*PROPOSERS] == [*settings.PROPOSER_NAMES]


@pytest.mark.parametrize("name", settings.PROPOSER_NAMES)
def test_a_proposer_takes_a_drafter_where_its_settings_say_so(name: str) -> None:
    from draftkit.decoding.catalogue import PROPOSERS

    loaded: list[str] = []

    def draft() -> TabularAdapter:
        loaded.append(name)
        return random_adapter(8, 1)

    made = PROPOSERS[name](draft, lambda: [[1, 2, 3]], random_adapter(8, 2))
    assert bool(loaded) == bool(made.weights()) == settings.DecodeConfig(proposer=name).has_drafter


@pytest.mark.parametrize("path", EXPERIMENTS, ids=str)
def test_an_experiment_opens_with_purpose_command_time_and_result(path: Path) -> None:
    text = header(path)
    assert text.startswith("# @package _global_\n# ")
    commands = re.findall(r"^#     (python -m pipelines\.(\S+) \+experiment=(\S+).*)$", text, re.M)
    assert len(commands) == 1
    command, stage, name = commands[0]
    assert name == path.stem == read(path)["name"]
    benchmarks = ("benchmarks.decoder", "benchmarks.training", "benchmarks.drift")
    scripts = (*benchmarks, "experiments.loop_vllm", "experiments.kinds")
    assert stage in ("distill", "evaluate", "serve", *scripts)
    given = [word for word in overrides(path) if ".path=" in word]
    assert [word.split("=")[0] for word in command.split()[4:]] == [
        word.split("=")[0] for word in given
    ]
    assert "\n# Expected: " in text


@pytest.mark.parametrize("path", EXPERIMENTS, ids=str)
def test_an_experiment_holds_deltas_only(path: Path) -> None:
    content = read(path)
    chosen = [f"{group}={option}" for group, option in selected(content).items()]
    given = [word for word in overrides(path) if ".path=" in word]
    before, after = composed(*chosen, *given), composed(*overrides(path))
    changed = {key for key in after if after[key] != before[key]}

    assert set(leaves(content)) == changed


SERVED_AS_THE_MODEL_SAYS = ["evaluate_pair", "pair", "qwen3_chat", "qwen3_eagle3", "serve_pair"]


def test_real_pairs_are_served_as_their_target_says_and_toys_as_the_settings_say() -> None:
    by_model = [path.stem for path in EXPERIMENTS if "from" in read(path).get("sampling", {})]
    assert sorted(by_model) == sorted(SERVED_AS_THE_MODEL_SAYS)
    assert composed()["sampling.from"] == "config"


@pytest.fixture
def advised(tmp_path: Path) -> list[str]:
    """The overrides that name a target whose authors advise a sampling."""
    shutil.copytree(ROOT / "draftkit" / "embedded", tmp_path / "target")
    advice = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(advice))
    return [f"target.path={tmp_path / 'target'}", "data=corpus", f"root={tmp_path}"]


def test_the_sampling_of_the_target_is_all_that_stages_see_and_it_is_printed_once(
    advised: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Addresses are those of the same values as they would be typed."""
    typed = ["sampling.temperature=0.6", "sampling.top_k=20", "sampling.top_p=0.95"]
    by_hand = compose_config([*advised, *typed])
    assert capsys.readouterr().out == ""
    by_model = compose_config([*advised, "sampling.from=model"])
    assert by_model.sampling == settings.SamplingConfig(temperature=0.6, top_k=20, top_p=0.95)
    assert plan(CONTEXTS, by_model).address == plan(CONTEXTS, by_hand).address
    assert plan(CONTEXTS, by_model).address != plan(CONTEXTS, compose_config(advised)).address
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("sampling.from=model: temperature 0.6, top_k 20, top_p 0.95, ")
    assert line.endswith("generation_config.json")


def test_what_is_set_beside_the_model_wins_also_where_it_is_the_default(
    advised: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose_config([*advised, "sampling.from=model", "sampling.temperature=1"])
    assert config.sampling == settings.SamplingConfig(temperature=1.0, top_k=20, top_p=0.95)
    assert "(temperature as given); top_k, top_p of " in capsys.readouterr().out


def test_pair_says_in_one_line_all_that_must_be_given() -> None:
    with pytest.raises(ValueError, match="must be given") as error:
        compose_config(["+experiment=pair", "draft.path=some/draft"])
    assert str(error.value) == (
        "target.path, data.path must be given: add target.path=... data.path=..."
    )


def test_a_drafter_that_is_given_is_not_made() -> None:
    """The default cuts one out of the target: that holds only where none is given."""
    assert compose_config().draft.shrink.layers == [0]
    for experiment in ("serve", "quickstart", "smoke", "smollm2_135m"):
        paths = ["target.path=a", "draft.path=some/draft"]
        given = compose_config([f"+experiment={experiment}", *paths])
        assert given.draft.path == "some/draft"
        assert given.draft.shrink.layers == []
    assert compose_config(["draft.path=null"]).draft.shrink.layers == [0]
    with pytest.raises(ValueError, match=r"draft\.shrink\.layers must be 0 where draft\.path"):
        compose_config(["draft.path=some/draft", "draft.shrink.layers=[0]"])


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_a_kind_of_drafter_is_chosen_by_one_word_over_any_experiment(experiment: Path) -> None:
    """No experiment says by settings of its own what kind a drafter is, or how it is cut."""
    given = [word for word in overrides(experiment) if not word.startswith("draft.path=")]
    made = composed(*given, "draft=peagle")
    told = [made[f"draft.{key}"] for key in ("path", "kind", "shrink.layers", "head.parallel")]
    assert told == [None, "eagle3", [], True]


@pytest.mark.parametrize("word", ["={enable_thinking: false}", ".enable_thinking=false"])
def test_options_of_a_template_need_no_plus(word: str) -> None:
    words = [f"data.template_options{word}"]
    assert compose_config(words).data.template_options == {"enable_thinking": False}
    own = ["data.template_options={a: b}", "sampling.from=config"]  # which asks no hub
    added = compose_config(["+experiment=qwen3_chat", "data=gsm8k", *own])
    assert added.data.template_options == {"enable_thinking": False, "a": "b"}


def test_lengths_and_batches_of_a_pair_follow_the_machine_and_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [*(f"{key}.path=x" for key in GIVEN), "sampling.from=config", "+experiment=pair"]

    def sizes(*words: str) -> list[int]:
        pair = compose_config([*given, *words])
        lengths = [pair.data.max_completion_tokens, pair.evaluate.max_new_tokens]
        assert pair.data.max_prompt_tokens == pair.data.max_length == 1024
        return [*lengths, pair.generate.batch_size, pair.optim.per_device_train_batch_size]

    assert sizes("hardware.device=cuda") == [1024, 256, 128, 32]
    capsys.readouterr()
    assert sizes("hardware.device=cpu", "generate.batch_size=8") == [128, 128, 8, 16]
    line = capsys.readouterr().out
    assert line.startswith("on this machine, where nothing else is given: ")
    assert "data.max_completion_tokens=128" in line
    assert "generate.batch_size" not in line
    assert sizes() == sizes("hardware.device=cpu")  # tests see no GPU


def test_the_tracker_is_offline_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    assert compose_config().tracker == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert compose_config().tracker == "online"
    assert compose_config(["tracker=none"]).tracker == "none"


def test_no_file_names_a_class_or_a_resolver_but_that_of_the_machine() -> None:
    """`by_device` is the one place where a value follows what there is to compute on."""
    for path in FILES:
        text = (CONF_DIR / path).read_text(encoding="utf-8")
        assert "_target_" not in text, path
        assert set(re.findall(r"\$\{([\w.]+):", text)) <= {"oc.env", "by_device"}, path
        assert "hydra" not in text or path.name == "config.yaml", path


REFUSALS = [
    ("+experiment=quikstart", "did you mean quickstart"),
    ("experiment=quickstart", "use +experiment=quickstart"),
    ("divergence=jds", "did you mean jsd"),
    ("+divergence=jsd", "Multiple values for divergence"),
    ("divergense=jsd", "did you mean divergence"),
    ("+optim.lerning_rate=1", "did you mean optim.learning_rate"),
    ("optm.learning_rate=1", "did you mean optim.learning_rate"),
    ("gama=3", "did you mean decode.gamma"),
    ("temperature=1", "did you mean sampling.temperature"),
    ("+zzz=1", "`draftkit settings` lists all"),
    ("optim.max_steps=many", "optim.max_steps: Value 'many'"),
    ("decode.gamma=null", "decode.gamma"),
    ("sampling.from=models", "sampling.from must be one of config, model, got 'models'"),
    ("sampling.temperature=hot", "sampling.temperature: Value 'hot'"),
    ("sampling.form=model", "did you mean sampling.from"),
    ("data.domains=python", "data.domains"),
    ("decode=block", "there is no setting decode: did you mean decode."),
    ("optim.max_steps={a: 1}", "optim.max_steps: "),
    ("tracker.mode=none", "there is no setting tracker.mode"),
    ("seed=many", "seed: Value 'many'"),
    ("target.lora.rank=2", "there is no setting target.lora.rank: did you mean draft.lora.rank?"),
    ("decode={gamma: 3, gam: 4}", "did you mean decode.gamma"),
    ("decode.gamma=[3", "'[3'"),
    ("seed=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
]


@pytest.mark.parametrize(("override", "told"), REFUSALS, ids=[word for word, _ in REFUSALS])
def test_a_wrong_override_is_refused_in_one_line_with_the_near_match(
    override: str, told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        compose_config([override])
    assert "\n" not in str(error.value)


def test_a_typo_in_a_file_is_refused_by_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CONF_DIR, tmp_path / "conf")
    monkeypatch.setattr(configuration, "CONF_DIR", tmp_path / "conf")
    experiment = tmp_path / "conf" / "experiment"
    (experiment / "mine.yaml").write_text("# @package _global_\nname: mine\ndecode:\n  gama: 3\n")
    with pytest.raises(ValueError, match=r"^experiment/mine.yaml: .*did you mean decode"):
        compose_config(["+experiment=mine"])
    (experiment / "mine.yaml").write_text("# @package _global_\nname: [mine\n")
    with pytest.raises(ValueError, match=r"mine\.yaml.*line 2") as error:
        compose_config(["+experiment=mine"])
    assert "\n" not in str(error.value)
