"""What the draft learns from, by which divergence, and how fast."""

import os
import shutil
from dataclasses import asdict, dataclass, field

from draftkit.config.choices import (
    COMPILE_NAMES,
    DIVERGENCE_NAMES,
    ENGINE_NAMES,
    GRANULARITY_NAMES,
    MIXTURE,
    OTHER_NAMES,
    SCHEDULE_NAMES,
    SOURCE_NAMES,
    TOKEN_NAMES,
    require,
    require_choice,
    require_positive,
)

WORTH_COMPILING = 200  # steps


@dataclass(kw_only=True)
class MixtureConfig:
    """Weights of the divergences in a sum of them."""

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    tvd: float = 0.0
    neg_log_alpha: float = 0.0
    lk_hybrid: float = 0.0
    ce_argmax: float = 0.0
    next_token: float = 0.0


@dataclass(kw_only=True)
class DivergenceConfig:
    """What `distill` minimises, and on which tokens. `temperature` null means the served one."""

    name: str = "forward_kl"
    beta: float = 0.5  # jsd: weight of the target in the mixture
    eta: float = 3.0  # lk_hybrid: how fast the weight moves from KL to TVD as alpha grows
    temperature: float | None = None
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    warmup_steps: int = 0  # of forward_kl, before all else
    tokens: str = "all"
    top_fraction: float = 0.4  # of each text, where tokens=top
    reference: str | None = None  # tokens=top: a draft; null takes where the loss is largest
    position_decay: float = 1.0  # source=block: weight of a proposal over the one before it

    def __post_init__(self) -> None:
        require_choice("divergence.name", self.name, (*DIVERGENCE_NAMES, MIXTURE))
        require_choice("divergence.tokens", self.tokens, TOKEN_NAMES)
        require(
            0 < self.beta < 1,
            "divergence.beta",
            "lie inside (0, 1); for the ends use divergence=forward_kl (0) or reverse_kl (1)",
            self.beta,
        )
        for name in ("eta", "warmup_steps"):
            value = getattr(self, name)
            require(value >= 0, f"divergence.{name}", "be at least 0", value)
        for name in ("top_fraction", "position_decay"):
            value = getattr(self, name)
            require(0 < value <= 1, f"divergence.{name}", "lie in (0, 1]", value)
        require_positive(self, "divergence", "temperature")
        weights = asdict(self.mixture)
        for name, weight in weights.items():
            require(weight >= 0, f"divergence.mixture.{name}", "be at least 0", weight)
        require(
            any(weights.values()) == (self.name == MIXTURE),
            "divergence.mixture",
            "have weights above 0 exactly where divergence=mixture",
            weights,
        )

    @property
    def terms(self) -> dict[str, float]:
        """The divergences of the sum, by name, with their weights."""
        if self.name != MIXTURE:
            return {self.name: 1.0}
        return {name: weight for name, weight in asdict(self.mixture).items() if weight > 0}

    @property
    def names(self) -> set[str]:
        """All divergences that some step takes."""
        return {*self.terms, *(["forward_kl"] if self.warmup_steps > 0 else [])}


@dataclass(kw_only=True)
class SourceConfig:
    """Whose sequences the divergence is taken on: the data's, the target's or the draft's.

    What the draft has a part in is sampled anew every `refresh_steps` steps, so it is at most
    `refresh_steps` - 1 steps old.
    """

    name: str = "draft"
    fraction: float = 0.5  # mix: how much the draft samples (GKD's lambda)
    other: str = "target"  # mix: where the rest comes from
    granularity: str = "sequence"  # mix: whole sequences, or single tokens, from either
    refresh_steps: int = 1

    def __post_init__(self) -> None:
        require_choice("source.name", self.name, SOURCE_NAMES)
        require(
            0 < self.fraction < 1,
            "source.fraction",
            "lie inside (0, 1); for the ends use source=target or fixed (0) or draft (1)",
            self.fraction,
        )
        require_choice("source.other", self.other, OTHER_NAMES)
        require_choice("source.granularity", self.granularity, GRANULARITY_NAMES)
        require(
            self.granularity == "sequence" or self.other == "target",
            "source.other",
            "be target when source.granularity=token: a text of the data cannot go on another",
            self.other,
        )
        require_positive(self, "source", "refresh_steps")


@dataclass(kw_only=True)
class GenerateConfig:
    """Target rollouts, stored once and shared by every experiment with the same settings.

    `engine`: our decoder, or one that serves the target over HTTP as OpenAI does. A key is read
    from the environment variable OPENAI_API_KEY alone.
    """

    rollouts: int = 1024
    batch_size: int = 128
    top_k: int = 0  # ids of the target stored for every token, to train without it; 0: none
    engine: str = "decoder"
    url: str | None = None  # openai: as http://127.0.0.1:8000/v1
    model: str | None = None  # openai: the name that it serves; null: `target.path`
    concurrency: int = 16  # openai: requests at a time

    def __post_init__(self) -> None:
        require_positive(self, "generate", "rollouts", "batch_size", "concurrency")
        require(self.top_k >= 0, "generate.top_k", "be at least 0 (0 stores none)", self.top_k)
        require_choice("generate.engine", self.engine, ENGINE_NAMES)
        require(
            self.engine == "decoder" or (self.url or "").startswith(("http://", "https://")),
            "generate.url",
            "be the address of an API, as http://127.0.0.1:8000/v1, when generate.engine=openai",
            self.url,
        )
        require("@" not in (self.url or ""), "generate.url", "hold no password", "...@...")


def has_compiler() -> bool:
    """Whether the machine has what turns generated code into machine code."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW, warm-up and schedule, in optimizer steps. Names are those of `transformers`.

    A step sees processes x gradient_accumulation_steps x per_device_train_batch_size rows.
    """

    learning_rate: float | None = None  # null: by the draft's width, see `learning_rate_for`
    # Multiples of it, of which the best on validation after a quarter of the steps is taken.
    rate_factors: list[float] = field(default_factory=list)
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
    group_by_length: bool = False  # texts (prompts, where the draft samples) of like length a step
    activation_checkpointing: bool = False  # less memory for a third more of the draft's work
    # auto: where there is a C++ compiler and the run is long enough to earn back half a minute
    compile: str = "auto"

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML reads true and false as booleans
        require_choice("optim.compile", self.compile, COMPILE_NAMES)
        require_choice("optim.lr_scheduler_type", self.lr_scheduler_type, SCHEDULE_NAMES)
        require_positive(self, "optim", "learning_rate", "max_steps", "max_grad_norm")
        require_positive(self, "optim", "per_device_train_batch_size", "eval_steps", "save_steps")
        require_positive(self, "optim", "gradient_accumulation_steps", "logging_steps")
        for factor in self.rate_factors:
            require(factor > 0, "optim.rate_factors", "be positive", factor)
        for name in ("warmup_steps", "weight_decay"):
            require(getattr(self, name) >= 0, f"optim.{name}", "be at least 0", getattr(self, name))
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}", "lie in [0, 1)", value)

    @property
    def rows_of_a_process(self) -> int:
        """Rows of a step that one process has."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def compiles(self) -> bool:
        """Whether losses and sampling run as machine code; results differ by rounding."""
        if self.compile == "auto":
            return self.max_steps >= WORTH_COMPILING and has_compiler()
        return self.compile == "true"
