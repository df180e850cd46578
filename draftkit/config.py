"""Every setting, its type, its default and its range: one dataclass a section, no hydra here.

A default is written once, in this file; the YAML under `conf/` holds choices. `pipelines/stage.py`
turns a composed configuration into a `Config`; everything below the pipelines sees these objects
only, and treats them as read-only (Hydra cannot fill a frozen dataclass).

This module imports nothing of ours: it names the choices itself, and a test compares the names
with the dicts of the code that implements them. A value out of range raises ValueError with the
key as the user types it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

DIVERGENCE_NAMES = ("forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha", "lk_hybrid")
DIVERGENCE_NAMES += ("ce_argmax", "next_token")
SOURCE_NAMES = ("fixed", "target", "draft")
VERIFICATION_NAMES = ("speculative", "block", "match")
COMPILE_NAMES = ("auto", "true", "false")
DOMAIN_NAMES = ("python", "prose", "cpp")
DATA_NAMES = ("installed", "local", "hub")
DTYPE_NAMES = ("auto", "float32", "bfloat16")
DEVICE_NAMES = ("auto", "cpu", "cuda")
SCHEDULE_NAMES = ("cosine", "constant")
TRACKER_MODES = ("offline", "online", "disabled", "none")
DRAFT_ROLES = ("trained", "given")
BENCHMARK_METHOD_NAMES = ("plain", "speculative", "adaptive", "eager_plain", "eager_speculative")
BENCHMARK_METHOD_NAMES += ("argmax", "lookup", "hybrid", "staged")
BENCHMARK_METHOD_NAMES += ("hf_plain", "hf_assisted", "hf_lookup")
BENCHMARK_METHODS = ("plain", "speculative", "adaptive", "hf_plain", "hf_assisted", "hf_lookup")
WEIGHT_NAMES = ("pair", "random")


def require(condition: bool, key: str, rule: str, value: object) -> None:
    """Raise ValueError `key must rule, got value` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{key} must {rule}, got {value!r}")


def require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError naming `key` and all choices unless `value` is one of them."""
    require(value in choices, key, f"be one of {', '.join(choices)}", value)


def require_positive(section: object, prefix: str, *names: str) -> None:
    """Raise ValueError naming the first of `names` that is neither positive nor null."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"{prefix}.{name}", "be positive", value)


@dataclass(kw_only=True)
class PretrainConfig:
    """The Llama-type model that `prepare` builds and trains where `path` is null."""

    num_hidden_layers: int = 8
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_attention_heads: int = 6
    max_position_embeddings: int = 512
    max_steps: int = 330
    per_device_train_batch_size: int = 8
    learning_rate: float = 2e-3

    def check(self, section: str) -> None:
        """Raise ValueError naming the key under `section` that is out of range."""
        require_positive(self, f"{section}.pretrain", *asdict(self))
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"{section}.pretrain.hidden_size",
            "be a multiple of num_attention_heads",
            self.hidden_size,
        )


@dataclass(kw_only=True)
class ModelConfig:
    """One model: a local folder or hub name, or null for the one that `prepare` trains."""

    path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)


@dataclass(kw_only=True)
class DataConfig:
    """Where text comes from and how a row becomes prompt and completion.

    `local`: `path` is a JSONL, Parquet or text file. `hub`: `path` is a dataset name.
    """

    name: str = "installed"
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    domains: list[str] = field(default_factory=lambda: list(DOMAIN_NAMES))
    max_megabytes: float = 8.0  # of `installed` text, shared equally by its domains
    max_rows: int | None = None  # of a file or hub data set
    vocab_size: int = 4096  # of the tokenizer that `prepare` trains
    prompt_column: str | None = None
    completion_column: str | None = None
    prompt_tokens: int = 32  # the prompt of a `text` row
    max_length: int = 128  # tokens of prompt and completion together
    validation_fraction: float = 0.05
    test_fraction: float = 0.05

    def __post_init__(self) -> None:
        require_choice("data.name", self.name, DATA_NAMES)
        for domain in self.domains:
            require_choice("data.domains", domain, DOMAIN_NAMES)
        require(bool(self.domains), "data.domains", "name at least one domain", self.domains)
        require_positive(self, "data", "max_megabytes", "max_rows")
        require(self.vocab_size >= 300, "data.vocab_size", "be at least 300", self.vocab_size)
        require(self.prompt_tokens >= 1, "data.prompt_tokens", "be at least 1", self.prompt_tokens)
        require(
            self.max_length > self.prompt_tokens,
            "data.max_length",
            "exceed data.prompt_tokens",
            self.max_length,
        )
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            require(0 < value < 0.5, f"data.{name}", "lie between 0 and 0.5", value)


@dataclass(kw_only=True)
class SamplingConfig:
    """The served distribution: the only temperature, top-k, top-p and penalty there are."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "sampling.temperature", "be at least 0", self.temperature)
        require(self.top_k >= 0, "sampling.top_k", "be at least 0 (0 keeps all)", self.top_k)
        require(0 < self.top_p <= 1, "sampling.top_p", "lie in (0, 1]", self.top_p)
        require_positive(self, "sampling", "repetition_penalty")


@dataclass(kw_only=True)
class DivergenceConfig:
    """What `distill` minimises. `temperature` null means the served one."""

    name: str = "forward_kl"
    beta: float = 0.5  # jsd: weight of the target in the mixture
    eta: float = 3.0  # lk_hybrid: how fast the weight moves from KL to TVD as alpha grows
    temperature: float | None = None

    def __post_init__(self) -> None:
        require_choice("divergence.name", self.name, DIVERGENCE_NAMES)
        require(
            0 < self.beta < 1,
            "divergence.beta",
            "lie inside (0, 1); for the ends use divergence=forward_kl (0) or reverse_kl (1)",
            self.beta,
        )
        require(self.eta >= 0, "divergence.eta", "be at least 0", self.eta)
        require_positive(self, "divergence", "temperature")


@dataclass(kw_only=True)
class SourceConfig:
    """Whose sequences the divergence is taken on: the data's, the target's or the draft's."""

    name: str = "draft"

    def __post_init__(self) -> None:
        require_choice("source.name", self.name, SOURCE_NAMES)


@dataclass(kw_only=True)
class GenerateConfig:
    """Target rollouts, stored once and shared by every experiment with the same settings."""

    rollouts: int = 1024
    batch_size: int = 128

    def __post_init__(self) -> None:
        require_positive(self, "generate", "rollouts", "batch_size")


@dataclass(kw_only=True)
class DecodeConfig:
    """Speculative decoding: tokens proposed per round, how they are verified, and by what code."""

    gamma: int = 4
    verification: str = "speculative"
    compile: str = "auto"  # auto: on CUDA, and wherever decoding itself is what is measured

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML reads true and false as booleans
        require(0 <= self.gamma <= 32, "decode.gamma", "lie in 0..32", self.gamma)
        require_choice("decode.verification", self.verification, VERIFICATION_NAMES)
        require_choice("decode.compile", self.compile, COMPILE_NAMES)


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW, warm-up and schedule, in optimizer steps. Names are those of `transformers`."""

    learning_rate: float | None = None  # null: by the draft's width, see `learning_rate_for`
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 10
    max_steps: int = 100
    per_device_train_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    eval_steps: int = 50
    save_steps: int = 25
    logging_steps: int = 5

    def __post_init__(self) -> None:
        require_choice("optim.lr_scheduler_type", self.lr_scheduler_type, SCHEDULE_NAMES)
        require_positive(self, "optim", "learning_rate", "max_steps", "max_grad_norm")
        require_positive(self, "optim", "per_device_train_batch_size", "eval_steps", "save_steps")
        require_positive(self, "optim", "gradient_accumulation_steps", "logging_steps")
        for name in ("warmup_steps", "weight_decay"):
            require(getattr(self, name) >= 0, f"optim.{name}", "be at least 0", getattr(self, name))
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}", "lie in [0, 1)", value)


@dataclass(kw_only=True)
class EvaluateConfig:
    """Held-out prompts, context length, timing effort and the bootstrap."""

    draft: str = "trained"  # `trained`: what `distill` made; `given`: `draft.path` itself
    temperatures: list[float] | None = None  # null: the served one
    prompts: int = 96
    max_new_tokens: int = 64
    batch_size: int = 32
    validation_prompts: int = 48  # of the selection in `distill`; the first of them calibrate
    timing_prompts: int = 24
    timing_batch_size: int = 1
    lossless_prompts: int = 32
    bootstrap: int = 2000

    def __post_init__(self) -> None:
        require_choice("evaluate.draft", self.draft, DRAFT_ROLES)
        counts = [name for name, value in asdict(self).items() if isinstance(value, int)]
        require_positive(self, "evaluate", *counts)
        require(self.prompts >= 2, "evaluate.prompts", "be at least 2", self.prompts)
        for temperature in self.temperatures or []:
            require(temperature >= 0, "evaluate.temperatures", "be at least 0", temperature)


@dataclass(kw_only=True)
class BenchmarkConfig:
    """Which ways to decode are timed beside each other, and on how much."""

    weights: str = "pair"  # random: models of the `pretrain` shapes instead, for speed alone
    methods: list[str] = field(default_factory=lambda: list(BENCHMARK_METHODS))
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    compiled_batch_sizes: list[int] = field(default_factory=lambda: [1])  # the rest runs eagerly
    prompts: int = 24  # of each setting; more where a batch size would make too few chunks of them
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        require_choice("benchmark.weights", self.weights, WEIGHT_NAMES)
        for name in self.methods:
            require_choice("benchmark.methods", name, BENCHMARK_METHOD_NAMES)
        for key in ("methods", "temperatures", "batch_sizes"):
            values = getattr(self, key)
            fits = 0 < len(values) == len(set(values))
            require(fits, f"benchmark.{key}", "name at least one, none twice", values)
        for temperature in self.temperatures:
            require(temperature >= 0, "benchmark.temperatures", "be at least 0", temperature)
        for size in self.batch_sizes:
            require(size > 0, "benchmark.batch_sizes", "be positive", size)
        require_positive(self, "benchmark", "prompts", "max_new_tokens")


@dataclass(kw_only=True)
class HardwareConfig:
    """Where and in which precision models run; never part of a stage's identity."""

    device: str = "auto"
    dtype: str = "auto"  # bfloat16 where the hardware computes it, else float32
    threads: int | None = None

    def __post_init__(self) -> None:
        require_choice("hardware.device", self.device, DEVICE_NAMES)
        require_choice("hardware.dtype", self.dtype, DTYPE_NAMES)
        require_positive(self, "hardware", "threads")


@dataclass(kw_only=True)
class TrackerConfig:
    """W&B beside the JSONL that is always written. `none` does not import wandb."""

    mode: str = "offline"
    project: str = "draftkit"
    entity: str | None = None

    def __post_init__(self) -> None:
        require_choice("tracker.mode", self.mode, TRACKER_MODES)


def _embedded_draft() -> ModelConfig:
    return ModelConfig(
        pretrain=PretrainConfig(
            num_hidden_layers=2,
            hidden_size=128,
            intermediate_size=384,
            num_attention_heads=4,
            max_steps=400,
        )
    )


@dataclass(kw_only=True)
class Config:
    """A whole experiment. Sections without a default factory of their own are groups in `conf/`."""

    name: str = "default"
    root: str = "outputs"
    seed: int = 0
    overwrite: bool = False
    runs: list[str] = field(default_factory=list)
    target: ModelConfig = field(default_factory=ModelConfig)
    draft: ModelConfig = field(default_factory=_embedded_draft)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        self.target.pretrain.check("target")
        self.draft.pretrain.check("draft")
        require(
            bool(self.name) and "/" not in self.name and not self.name.startswith("."),
            "name",
            "be a plain folder name",
            self.name,
        )
        require(self.seed >= 0, "seed", "be at least 0", self.seed)
        require(
            self.data.name == "installed" or self.data.path is not None,
            "data.path",
            f"name a file or data set when data={self.data.name}",
            self.data.path,
        )

    @property
    def training_temperature(self) -> float:
        """The temperature of the loss: `divergence.temperature`, else the served one.

        Greedy serving leaves one-hot distributions, between which no divergence has a gradient of
        use: raises ValueError unless `ce_argmax` or `next_token` is trained, or a temperature set.
        """
        if self.divergence.temperature is not None:
            return self.divergence.temperature
        if self.sampling.temperature == 0:
            require(
                self.divergence.name in ("ce_argmax", "next_token"),
                "divergence",
                "be ce_argmax (or set divergence.temperature=1) when sampling.temperature=0",
                self.divergence.name,
            )
        return self.sampling.temperature or 1.0


def flatten(section: object, prefix: str = "") -> dict[str, Any]:
    """A dataclass as `{dotted key: value}`, in order, the form in which settings are compared."""
    flat: dict[str, Any] = {}

    def walk(node: dict[str, Any], path: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{path}{key}.")
            else:
                flat[f"{path}{key}"] = value

    walk(asdict(section), prefix)  # type: ignore[arg-type]
    return flat
