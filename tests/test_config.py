"""Ranges are checked where the value is made, and refused by the key that the user typed."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import (
    Config,
    DecodeConfig,
    DivergenceConfig,
    EvaluateConfig,
    GenerateConfig,
    OptimConfig,
    SamplingConfig,
    flatten,
    has_compiler,
)

# Values that no other setting has a part in.
WRONG: dict[str, list[Any]] = {
    "data.name": ["web"],
    "data.domains": [["poetry"], []],
    "data.max_rows": [0],
    "data.max_bad_rows": [-0.1, 1.5],
    "data.prompt_tokens": [0],
    "data.test_fraction": [0, 0.95, 1],
    "data.validation_fraction": [0],
    "data.path": [None],
    "sampling.temperature": [-1, 1e-40, "a", True],
    "sampling.top_k": [-1, 2.5],
    "sampling.top_p": [0, 1e-7, 1.5],
    "sampling.repetition_penalty": [0],
    "divergence.name": ["kl"],
    "divergence.beta": [0, 1],
    "divergence.temperature": [0, 1e-9],
    "divergence.mixture": [{"kl": 1}, {"tvd": "much"}],
    "divergence.mixture.tvd": [-1],
    "divergence.warmup_steps": [-1],
    "divergence.tokens": ["hard"],
    "divergence.position_decay": [1.1],
    "source.name": ["student"],
    "source.refresh_steps": [0],
    "generate.rollouts": [0],
    "generate.batch_size": [0],
    "target.urls": [["localhost:8000/v1"], ["http://me:secret@host/v1"]],
    "decode.gamma": [-1, "best"],
    "decode.verification": ["lenient"],
    "decode.draft_gamma": [0, 5],
    "decode.lookup_min": [0, 4],
    "decode.tree": [-1, 65],
    "decode.typical_epsilon": [0, 1.5],
    "optim.compile": ["yes"],
    "optim.learning_rate": [0],
    "optim.max_steps": [0, 1.5],
    "optim.warmup_steps": [-1],
    "optim.lr_scheduler_type": ["sqrt"],
    "evaluate.prompts": [0],
    "evaluate.timing_prompts": [0],
    "evaluate.timing_minutes": [0],
    "evaluate.temperatures": [[1.0, -1.0], [1e-9], 0.5],
    "evaluate.draft": ["new"],
    "evaluate.lossless": ["bfloat16"],
    "export.dtype": ["float16"],
    "hardware.device": ["tpu"],
    "hardware.dtype": ["float16"],
    "hardware.threads": [0],
    "target.path": [None, Path("a")],
    "target.trust_remote_code": ["yes"],
    "draft.pretrain.hidden_size": [130],
    "draft.pretrain.max_steps": [0],
    "draft.extra_tokens": ["always"],
    "draft.lora.rank": [-1],
    "draft.shrink.layers": [[1, 0], [0, 0], [-1, 0], -1, "4", [0, True]],
    "draft.shrink.vocabulary": [8],
    "draft.shrink.steps": [8],
    "serve.port": [-1],
    "online.teacher": ["draft"],
    "online.routes": [["default", "../code"], ["code"]],
    "online.route": ["code"],
    "online.anchor_fraction": [-0.1, 0.8],
    "online.sink": ["s3://me:secret@bucket/traffic"],
    "online.buffer.fraction": [1.1],
    "online.gate.fraction": [0],
    "online.gate.records": [1],
    "tracker": ["quiet"],
    "limit": [0],
    "name": ["../elsewhere", ""],
    "seed": [-1, 2**32, None],
    "sampling": [{"temperature": 0}],
    "runs": ["outputs", [1]],
}
# Settings that do not go together: the one that is refused, then all that are given.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("data.max_length", {"data.prompt_tokens": 32, "data.max_length": 32}),
    ("data.test_fraction", {"data.test_fraction": 0.5, "data.validation_fraction": 0.5}),
    ("data.domains", {"data.path": "draftkit/questions", "data.domains": ["python"]}),
    ("data.domains", {"data.path": "mine.jsonl", "data.domains": ["code"]}),
    ("target.weights", {"target.weights": "int4", "target.urls": ["http://localhost:8000"]}),
    ("data.path", {"data.path": "s3://me:secret@bucket/traffic"}),
    ("divergence.mixture", {"divergence.name": "mixture"}),
    ("source.fraction", {"source.name": "mix", "source.fraction": 0}),
    ("source.fraction", {"source.name": "mix", "source.fraction": 1}),
    ("source.other", {"source.name": "mix", "source.other": "draft"}),
    ("online.prompts", {"online.prompts": True, "online.teacher": "stored"}),
    ("draft.shrink.vocabulary", {"draft.shrink.layers": [0], "draft.shrink.vocabulary": -1}),
    ("draft.shrink.layers", {"draft.path": "some/model", "draft.shrink.layers": [0]}),
    ("draft.shrink.steps", {"draft.shrink.layers": [0], "draft.shrink.steps": -1}),
]
REFUSED = [(key, {key: value}) for key, values in WRONG.items() for value in values] + TOGETHER


def made(section: Any, settings: dict[str, Any], prefix: str = "") -> Any:
    """`section` with `settings`, by dotted keys; what is below a section is made first."""
    changes = {}
    for one in fields(section):
        key, value = f"{prefix}{one.name}", getattr(section, one.name)
        below = [name for name in settings if name.startswith(f"{key}.")]
        if key in settings:
            changes[one.name] = settings[key]
        elif below and is_dataclass(value):
            changes[one.name] = made(value, settings, f"{key}.")
        elif below:
            changes[one.name] = {name.removeprefix(f"{key}."): settings[name] for name in below}
    return replace(section, **changes)


@pytest.mark.parametrize(("key", "settings"), REFUSED)
def test_a_value_out_of_range_is_refused_by_its_key_in_one_line(
    key: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(key)} must [^\n]*\Z"):
        made(Config(), settings)


def test_losses_are_compiled_by_themselves_where_it_pays_and_a_compiler_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not OptimConfig(max_steps=1000).compiles
    assert OptimConfig(max_steps=1, compile="true").compiles  # who says so hears why it cannot
    (tmp_path / "g++").touch(mode=0o755)
    assert OptimConfig(max_steps=1000).compiles
    assert not OptimConfig(max_steps=100).compiles
    monkeypatch.setenv("CXX", "absent")
    assert not OptimConfig(max_steps=1000).compiles


def test_long_texts_of_the_target_are_written_by_compiled_rounds_and_are_another_product() -> None:
    from pipelines.plan import GENERATE
    from pipelines.product import plan

    def config(**changes: Any) -> Config:
        optim = OptimConfig(compile=changes.pop("compile", "auto"))
        return Config(generate=GenerateConfig(**changes), optim=optim)

    many, few = {"rollouts": 1600, "batch_size": 100}, {"rollouts": 1500, "batch_size": 100}
    assert config(**many).compiles_texts == has_compiler()
    assert not config(**few).compiles_texts
    assert config(**few, compile="true").compiles_texts
    assert not config(**many, compile="false").compiles_texts
    folders = [plan(GENERATE, config(**few, compile=one)).path for one in ("auto", "false", "true")]
    assert folders[0] == folders[1] != folders[2]


def test_a_refusal_says_what_the_setting_means() -> None:
    with pytest.raises(
        ValueError, match=r"in \(0, 1\), got 1\.0 \(jsd: .*forward_kl is 0, reverse_kl is 1\)$"
    ):
        DivergenceConfig(beta=1.0)


def test_the_loss_is_taken_at_the_served_temperature_unless_told_otherwise() -> None:
    served = SamplingConfig(temperature=0.7)
    assert Config(sampling=served).training_temperature == 0.7
    told = DivergenceConfig(temperature=2.0)
    assert Config(sampling=served, divergence=told).training_temperature == 2.0
    greedy = SamplingConfig(temperature=0)
    for divergence in (DivergenceConfig(name="ce_argmax"), DivergenceConfig(temperature=1.0)):
        assert Config(sampling=greedy, divergence=divergence).training_temperature == 1.0
    with pytest.raises(
        ValueError, match=r"^divergence must be ce_argmax \(or set divergence\.temp"
    ):
        _ = Config(sampling=greedy).training_temperature


def test_flatten_names_every_setting_as_the_user_types_it() -> None:
    flat = flatten(Config())
    assert flat["draft.pretrain.hidden_size"] == 128
    assert flat["data.domains"] is None
    assert flat["seed"] == 0

    def leaves(node: object) -> int:
        found = [getattr(node, field.name) for field in fields(node)]  # type: ignore[arg-type]
        return sum(leaves(value) if is_dataclass(value) else 1 for value in found)

    assert len(flat) == leaves(Config())


def test_a_proposer_is_one_of_those_there_are_and_none_is_plain_decoding() -> None:
    assert DecodeConfig(proposer="none", gamma=4).gamma == 0
    with pytest.raises(
        ValueError, match=r"^decode\.proposer must be one of sampled, .*'eagle' \(who proposes\)$"
    ):
        DecodeConfig(proposer="eagle")


@pytest.mark.parametrize("name", ["hybrid", "staged", "ngram", "prompt_lookup", "none"])
def test_a_tree_needs_a_law_of_every_depth_and_a_rule_for_trees(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^decode\.proposer must be sampled or .*'{name}'$"):
        DecodeConfig(tree=4, proposer=name)
    with pytest.raises(ValueError, match=r"^decode\.verification must be .* chain, got 'block'"):
        DecodeConfig(tree=4, verification="block")


def test_an_automatic_gamma_is_a_number_wherever_nothing_is_measured() -> None:
    assert (DecodeConfig().gamma, DecodeConfig().proposals) == (4, 4)
    assert (DecodeConfig(gamma="auto").gamma, DecodeConfig(gamma="auto").proposals) == ("auto", 4)
    assert DecodeConfig(gamma=7).proposals == 7
    assert DecodeConfig(gamma="auto", proposer="none").proposals == 0


def test_yaml_may_switch_the_identity_check_off() -> None:
    assert EvaluateConfig(lossless="False").lossless == "off"  # as YAML hands it on


def test_there_are_no_more_settings_than_a_person_reads() -> None:
    """A new one needs a user who changes it, and an old one should go."""
    assert len(flatten(Config())) <= 144
