"""Ranges are checked where the value is made, and refused by the key that the user typed."""

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import (
    BufferConfig,
    Config,
    DataConfig,
    DecodeConfig,
    DivergenceConfig,
    DraftConfig,
    EvaluateConfig,
    ExportConfig,
    GateConfig,
    GenerateConfig,
    HardwareConfig,
    OnlineConfig,
    OptimConfig,
    PretrainConfig,
    SamplingConfig,
    ServeConfig,
    SourceConfig,
    TargetConfig,
    TargetPretrainConfig,
    TrafficConfig,
    flatten,
)
from draftkit.config import choices as settings
from draftkit.config.text import LoraConfig, ShrinkConfig

Make = Callable[[], Any]


def draft(**parts: Any) -> Config:
    return Config(draft=DraftConfig(**parts))


REFUSED: list[tuple[str, Make]] = [
    ("data.name", lambda: DataConfig(name="web")),
    ("data.domains", lambda: DataConfig(domains=["poetry"])),
    ("data.domains", lambda: DataConfig(domains=[])),
    ("data.max_rows", lambda: DataConfig(max_rows=0)),
    ("data.vocab_size", lambda: DataConfig(vocab_size=255)),
    ("data.prompt_tokens", lambda: DataConfig(prompt_tokens=0)),
    ("data.max_length", lambda: DataConfig(prompt_tokens=32, max_length=32)),
    ("data.test_fraction", lambda: DataConfig(test_fraction=0.5)),
    ("data.validation_fraction", lambda: DataConfig(validation_fraction=0)),
    ("sampling.temperature", lambda: SamplingConfig(temperature=-1)),
    ("sampling.top_k", lambda: SamplingConfig(top_k=-1)),
    ("sampling.top_p", lambda: SamplingConfig(top_p=0)),
    ("sampling.top_p", lambda: SamplingConfig(top_p=1.5)),
    ("sampling.repetition_penalty", lambda: SamplingConfig(repetition_penalty=0)),
    ("divergence.name", lambda: DivergenceConfig(name="kl")),
    ("divergence.beta", lambda: DivergenceConfig(beta=0)),
    ("divergence.beta", lambda: DivergenceConfig(beta=1)),
    ("divergence.eta", lambda: DivergenceConfig(eta=-1)),
    ("divergence.temperature", lambda: DivergenceConfig(temperature=0)),
    ("divergence.mixture", lambda: DivergenceConfig(name="mixture")),
    ("divergence.mixture", lambda: DivergenceConfig(mixture={"kl": 1})),
    ("divergence.mixture.tvd", lambda: DivergenceConfig(mixture={"tvd": -1})),
    ("divergence.warmup_steps", lambda: DivergenceConfig(warmup_steps=-1)),
    ("divergence.tokens", lambda: DivergenceConfig(tokens="hard")),
    ("divergence.top_fraction", lambda: DivergenceConfig(top_fraction=0)),
    ("divergence.position_decay", lambda: DivergenceConfig(position_decay=1.1)),
    ("optim.rate_factors", lambda: OptimConfig(rate_factors=[1, 0])),
    ("optim.compile", lambda: OptimConfig(compile="yes")),
    ("source.name", lambda: SourceConfig(name="student")),
    ("source.fraction", lambda: SourceConfig(name="mix", fraction=0)),
    ("source.fraction", lambda: SourceConfig(name="mix", fraction=1)),
    ("source.other", lambda: SourceConfig(name="mix", other="draft")),
    ("source.other", lambda: SourceConfig(name="mix", other="fixed", granularity="token")),
    ("source.granularity", lambda: SourceConfig(name="mix", granularity="batch")),
    ("source.refresh_steps", lambda: SourceConfig(refresh_steps=0)),
    ("generate.rollouts", lambda: GenerateConfig(rollouts=0)),
    ("generate.batch_size", lambda: GenerateConfig(batch_size=0)),
    ("generate.engine", lambda: GenerateConfig(engine="vllm")),
    ("generate.url", lambda: GenerateConfig(engine="openai")),
    ("generate.url", lambda: GenerateConfig(engine="openai", url="localhost:8000/v1")),
    ("generate.url", lambda: GenerateConfig(engine="openai", url="http://me:secret@host/v1")),
    ("decode.gamma", lambda: DecodeConfig(gamma=-1)),
    ("decode.gamma", lambda: DecodeConfig(gamma="best")),
    ("evaluate.timing_minutes", lambda: EvaluateConfig(timing_minutes=0)),
    ("decode.verification", lambda: DecodeConfig(verification="typical")),
    ("optim.learning_rate", lambda: OptimConfig(learning_rate=0)),
    ("optim.max_steps", lambda: OptimConfig(max_steps=0)),
    ("optim.warmup_steps", lambda: OptimConfig(warmup_steps=-1)),
    ("optim.lr_scheduler_type", lambda: OptimConfig(lr_scheduler_type="sqrt")),
    ("evaluate.prompts", lambda: EvaluateConfig(prompts=0)),
    ("evaluate.timing_prompts", lambda: EvaluateConfig(timing_prompts=0)),
    ("evaluate.temperatures", lambda: EvaluateConfig(temperatures=[1.0, -1.0])),
    ("evaluate.draft", lambda: EvaluateConfig(draft="new")),
    ("export.dtype", lambda: ExportConfig(dtype="float16")),
    ("hardware.device", lambda: HardwareConfig(device="tpu")),
    ("hardware.dtype", lambda: HardwareConfig(dtype="float16")),
    ("target.dtype", lambda: TargetConfig(dtype="float16")),
    ("draft.dtype", lambda: draft(dtype="bf16")),
    ("evaluate.lossless", lambda: EvaluateConfig(lossless="bfloat16")),
    ("hardware.threads", lambda: HardwareConfig(threads=0)),
    ("serve.port", lambda: ServeConfig(port=-1)),
    ("serve.top_logprobs", lambda: ServeConfig(top_logprobs=-1)),
    ("online.teacher", lambda: OnlineConfig(teacher="draft")),
    ("online.prompts", lambda: OnlineConfig(prompts=True, teacher="stored")),
    ("online.routes", lambda: OnlineConfig(routes=["default", "../code"])),
    ("online.routes", lambda: OnlineConfig(routes=["code"])),
    ("online.route", lambda: OnlineConfig(route="code")),
    ("online.recent_fraction", lambda: OnlineConfig(recent_fraction=0.8)),
    ("online.anchor_fraction", lambda: OnlineConfig(anchor_fraction=-0.1)),
    ("online.worth", lambda: OnlineConfig(worth=-1)),
    ("online.nice", lambda: OnlineConfig(nice=20)),
    ("online.buffer.fraction", lambda: BufferConfig(fraction=1.1)),
    ("online.gate.fraction", lambda: GateConfig(fraction=0)),
    ("online.gate.records", lambda: GateConfig(records=1)),
    ("online.traffic.requests", lambda: TrafficConfig(requests=0)),
    ("tracker", lambda: Config(tracker="quiet")),
    ("limit", lambda: Config(limit=0)),
    ("name", lambda: Config(name="../elsewhere")),
    ("name", lambda: Config(name="")),
    ("seed", lambda: Config(seed=-1)),
    ("seed", lambda: Config(seed=2**32)),
    ("data.path", lambda: Config(data=DataConfig(path=None))),
    (
        "target.pretrain.max_steps",
        lambda: TargetPretrainConfig(max_steps=0),
    ),
    (
        "draft.pretrain.hidden_size",
        lambda: PretrainConfig(hidden_size=130),
    ),
    ("draft.lora.rank", lambda: draft(lora=LoraConfig(rank=-1))),
    ("draft.lora.alpha", lambda: draft(lora=LoraConfig(alpha=0))),
    ("draft.shrink.layers", lambda: draft(shrink=ShrinkConfig(layers=[1, 0]))),
    ("draft.shrink.layers", lambda: draft(shrink=ShrinkConfig(layers=[0, 0]))),
    ("draft.shrink.layers", lambda: draft(shrink=ShrinkConfig(layers=[-1, 0]))),
    ("draft.shrink.layers", lambda: draft(shrink=ShrinkConfig(layers=-1))),
    ("draft.shrink.layers", lambda: draft(shrink=ShrinkConfig(layers="4"))),
    ("draft.shrink.layers", lambda: draft(shrink=ShrinkConfig(layers=[0, True]))),
    ("draft.shrink.vocabulary", lambda: draft(shrink=ShrinkConfig(layers=[0], vocabulary=-1))),
    ("draft.shrink.vocabulary", lambda: draft(shrink=ShrinkConfig(vocabulary=8))),
    (
        "draft.shrink.layers",
        lambda: draft(path="some/model", shrink=ShrinkConfig(layers=[0])),
    ),
    ("draft.shrink.steps", lambda: draft(shrink=ShrinkConfig(steps=8))),
    ("draft.shrink.steps", lambda: draft(shrink=ShrinkConfig(layers=[0], steps=-1))),
    ("divergence", lambda: Config(sampling=SamplingConfig(temperature=0)).training_temperature),
]


@pytest.mark.parametrize(("key", "make"), REFUSED)
def test_a_value_out_of_range_is_refused_by_its_key_in_one_line(key: str, make: Make) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(key)} must [^\n]*\Z"):
        make()


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


def test_a_refused_choice_is_answered_with_all_choices() -> None:
    with pytest.raises(ValueError, match="forward_kl, reverse_kl, jsd, tvd") as error:
        DivergenceConfig(name="kl")
    assert "got 'kl'" in str(error.value)


def test_the_ends_of_jsd_name_the_divergences_that_they_are() -> None:
    with pytest.raises(ValueError, match=r"forward_kl \(0\) or reverse_kl \(1\)"):
        DivergenceConfig(beta=1.0)


def test_a_draft_is_cut_or_given_and_trained_whole_or_by_lora() -> None:
    assert draft(shrink=ShrinkConfig(layers=[0, 3], vocabulary=8), lora=LoraConfig(rank=4))
    assert draft(path="some/model", lora=LoraConfig(rank=4))


def test_greedy_serving_trains_by_argmax_or_at_a_stated_temperature() -> None:
    greedy = SamplingConfig(temperature=0)
    assert Config(sampling=greedy, divergence=DivergenceConfig(name="ce_argmax"))
    assert Config(sampling=greedy, divergence=DivergenceConfig(temperature=1.0))


def test_the_loss_is_taken_at_the_served_temperature_unless_told_otherwise() -> None:
    served = SamplingConfig(temperature=0.7)
    assert Config(sampling=served).training_temperature == 0.7
    told = DivergenceConfig(temperature=2.0)
    assert Config(sampling=served, divergence=told).training_temperature == 2.0
    greedy = Config(
        sampling=SamplingConfig(temperature=0), divergence=DivergenceConfig(name="ce_argmax")
    )
    assert greedy.training_temperature == 1.0


def test_flatten_names_every_setting_as_the_user_types_it() -> None:
    flat = flatten(Config())
    assert flat["draft.pretrain.hidden_size"] == 128
    assert flat["data.domains"] == ["python", "prose", "cpp"]
    assert flat["seed"] == 0

    def leaves(node: object) -> int:
        found = [getattr(node, field.name) for field in fields(node)]  # type: ignore[arg-type]
        return sum(leaves(value) if is_dataclass(value) else 1 for value in found)

    assert len(flat) == leaves(Config())


def test_a_section_can_be_flattened_under_its_name() -> None:
    assert flatten(DecodeConfig(gamma=3), "decode.") == {
        "decode.gamma": 3,
        "decode.proposer": "sampled",
        "decode.verification": "speculative",
        "decode.compile": "auto",
    }


def test_a_proposer_goes_by_its_names_and_none_is_plain_decoding() -> None:
    assert DecodeConfig(proposer="draft").proposer == "sampled"
    assert DecodeConfig(proposer="none", gamma=4).gamma == 0
    with pytest.raises(ValueError, match=r"^decode\.proposer must be one of sampled, .*'eagle'$"):
        DecodeConfig(proposer="eagle")


def test_an_automatic_gamma_is_a_number_wherever_nothing_is_measured() -> None:
    assert (DecodeConfig().gamma, DecodeConfig().proposals) == (4, 4)
    assert (DecodeConfig(gamma="auto").gamma, DecodeConfig(gamma="auto").proposals) == ("auto", 4)
    assert DecodeConfig(gamma=7).proposals == 7
    assert DecodeConfig(gamma="auto", proposer="none").proposals == 0


def test_yaml_may_switch_the_identity_check_off() -> None:
    assert EvaluateConfig(lossless="False").lossless == "off"  # as YAML hands it on


def test_names_of_choices_are_not_repeated() -> None:
    shared = [getattr(settings, name) for name in vars(settings) if name.endswith("_NAMES")]
    rules = [rule for rule in rules_of(Config()) if rule.names]
    assert len(rules) > 20
    for choices in (*shared, *(rule.names for rule in rules)):
        assert len(choices) == len(set(choices)) >= 2, choices


def rules_of(section: Any) -> list[settings.Rule]:
    """The rules of all fields of a section and of those in it."""
    found: list[settings.Rule] = []
    for field in fields(section):
        value = getattr(section, field.name)
        found += rules_of(value) if is_dataclass(value) else []
        found += [field.metadata["rule"]] if "rule" in field.metadata else []
    return found
