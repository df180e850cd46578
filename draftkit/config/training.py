"""What the draft learns from, by which divergence, and how fast."""

from dataclasses import dataclass

from draftkit.config.choices import (
    DIVERGENCE_NAMES,
    SCHEDULE_NAMES,
    SOURCE_NAMES,
    require,
    require_choice,
    require_positive,
)


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
