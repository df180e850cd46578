"""A whole experiment: all sections together, and where it runs and reports."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_origin

from draftkit.config.choices import DTYPE_NAMES, Section, positive, require, setting
from draftkit.config.measuring import DecodeConfig, EngineConfig, EvaluateConfig, ExportConfig
from draftkit.config.service import CaptureConfig, OnlineConfig, ServeConfig
from draftkit.config.text import (
    SAMPLING_FROM,
    DataConfig,
    DraftConfig,
    SamplingConfig,
    TargetConfig,
)
from draftkit.config.training import (
    LOTS_WORTH_COMPILING,
    USUAL_TOP_K,
    DivergenceConfig,
    GenerateConfig,
    OptimConfig,
    SourceConfig,
)

SERVERS = ("with", "without")  # a drafter: the keys of `certify`
MOST_SEED = 2**32 - 1  # with the number of an epoch beside it, a seed still is one of 64 bits


@dataclass(kw_only=True)
class HardwareConfig(Section, key="hardware"):
    """Where and in which precision models run; never part of a stage's identity."""

    device: str = setting("auto", "auto: a GPU where there is one", names=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto", "precision; auto: bfloat16 where it is computed", names=("auto", *DTYPE_NAMES)
    )
    threads: int | None = positive(None, "of the CPU; null: as torch chooses")
    shard_target: bool = setting(False, "of several processes each holds a part of the target")


@dataclass(kw_only=True)
class Config(Section, key=""):
    """What is run, and where its results lie."""

    name: str = setting("default", "of the experiment, and of its folder in `root`")
    root: str = setting("outputs", "folder of all results")
    seed: int = setting(0, "of all that is drawn", f"[0, {MOST_SEED}]")
    overwrite: bool = setting(False, "make the stage anew, though it is complete")
    plan: bool = setting(False, "print what would be done, and stop")
    limit: int | None = positive(
        None, "run so many batches of each stage, project what the whole takes, and stop"
    )
    job: str | None = setting(None, "the job of a sweep, set by the command")
    runs: list[str] = setting([], "folders or wandb:PROJECT/GROUP, for `compare`")
    certify: dict[str, str] = setting(
        {}, "two servers, {with: URL, without: URL}: `evaluate` compares their answers, and no more"
    )
    tracker: str = setting(
        "offline",
        "mode of Weights & Biases, beside the files that are always written; none: not imported",
        names=("offline", "online", "disabled", "none"),
    )
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = bool(self.name) and "/" not in self.name and not self.name.startswith(".")
        require(plain, "name", "be a plain folder name", self.name)
        require(self.job is None or "/" not in self.job, "job", "be left to sweeps", self.job)
        require(self.target.path is not None, "target.path", "name a model", None)
        heads = self.draft.is_head or not self.generate.hidden_states
        rule = "be false without draft.kind=eagle3 or medusa"
        require(heads, "generate.hidden_states", rule, self.generate.hidden_states)
        urls = [self.certify.get(key, "") for key in SERVERS]
        two = {*self.certify} <= {*SERVERS} and urls[0] != urls[1]
        web = all(url.startswith(("http://", "https://")) and "@" not in url for url in urls)
        rule = "name two servers by their URLs, certify.with=URL and certify.without=URL"
        require(not self.certify or (two and web), "certify", rule, self.certify)
        layers, rule = self.draft.shrink.layers, "be 0 where draft.path names the drafter"
        require(self.draft.path is None or not layers, "draft.shrink.layers", rule, layers)
        rule = f"name a file or data set when data={self.data.name}"
        self.data.require(self.data.path is not None, "path", rule)

    @property
    def proposals(self) -> int:
        """Tokens proposed a round, wherever the best number is not measured."""
        draft = self.draft
        if self.decode.gamma == "auto" and draft.kind == "pard":
            return draft.pard.tokens
        in_one_pass = draft.kind == "medusa" or (draft.kind == "eagle3" and draft.head.parallel)
        if self.decode.gamma == "auto" and in_one_pass:
            return draft.head.tokens
        return self.decode.proposals

    @property
    def scored_by_engine(self) -> bool:
        """Whether the engines of `target.urls` stand for the target's weights. A head reads its
        hidden states, which they do not tell."""
        return bool(self.target.urls) and not self.draft.is_head

    @property
    def compiles_texts(self) -> bool:
        """Whether the target writes training texts by compiled rounds; results differ by rounding.

        A lot of texts is as many rounds as its longest answer has tokens.
        """
        lots = -(-self.generate.rollouts // self.generate.batch_size)
        return not self.target.urls and self.optim.compiles_for(lots, LOTS_WORTH_COMPILING)

    @property
    def teacher_top_k(self) -> int:
        """Likeliest ids of a token that an engine is asked for."""
        return self.generate.top_k or USUAL_TOP_K

    @property
    def stores_scores(self) -> bool:
        """Whether scores lie with the texts that are learned; an engine scores new ones as they
        come."""
        is_new = self.source.name not in ("target", "fixed")
        return self.generate.top_k > 0 and not (self.scored_by_engine and is_new)

    @property
    def training_temperature(self) -> float:
        """The temperature of the loss: `divergence.temperature`, else the served one.

        Greedy serving leaves one-hot distributions, between which no divergence has a gradient of
        use: raises ValueError unless `ce_argmax` or `next_token` is trained, or a temperature set.
        """
        if self.divergence.temperature is not None:
            return self.divergence.temperature
        if self.sampling.temperature == 0:
            name = self.divergence.name
            rule = "be ce_argmax (or set divergence.temperature=1) when sampling.temperature=0"
            require(name in ("ce_argmax", "next_token"), "divergence", rule, name)
        return self.sampling.temperature or 1.0


def sections(section: Any = Config) -> list[Any]:
    """The class `section` and those of all sections below it, in order."""
    below = [one.type for one in fields(section) if is_dataclass(one.type)]
    return [section, *(deep for one in below for deep in sections(one))]


def known_settings() -> dict[str, Field[Any]]:
    """Every setting of a command by its dotted key, in order."""
    leaves = {
        f"{section.key}.{one.name}".lstrip("."): one
        for section in sections()
        for one in fields(section)
        if not is_dataclass(one.type)
    }
    return leaves | {"sampling.from": SAMPLING_FROM}


# Settings with keys of their own.
MAPPINGS = tuple(key for key, one in known_settings().items() if get_origin(one.type) is dict)


def with_sections(config: Config, sections: Mapping[str, Any]) -> Config:
    """`config` with some of its sections. Raises ValueError for a name that is none."""
    for name in sections:
        known = name in vars(config)
        require(known, name, "be a section of draftkit.config.Config", "no such section")
    return replace(config, **sections)


def flatten(section: Any, prefix: str = "") -> dict[str, Any]:
    """A section or nested mapping as `{dotted key: value}`, in order, as settings are compared.

    A setting that is a mapping itself stays one.
    """
    flat: dict[str, Any] = {}
    for key, value in (section if isinstance(section, Mapping) else vars(section)).items():
        if f"{prefix}{key}" in MAPPINGS:
            flat[f"{prefix}{key}"] = dict(value)
        elif is_dataclass(value) or isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
