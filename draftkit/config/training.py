"""What the draft learns from, by which divergence, and how fast."""

import os
import shutil
from dataclasses import dataclass

from draftkit.config.choices import (
    DIVERGENCE_NAMES,
    DIVISOR,
    MIXTURE,
    SOURCE_NAMES,
    Section,
    choice,
    positive,
    require,
    setting,
)

WORTH_COMPILING = 200  # steps
LOTS_WORTH_COMPILING = 16  # lots of answers: the code takes half a minute, and halves a round
USUAL_TOP_K = 20  # ids that vLLM names without --max-logprobs


@dataclass(kw_only=True)
class DivergenceConfig(Section, key="divergence"):
    """What `distill` minimises, and on which tokens."""

    name: str = choice(
        "forward_kl", "what is minimised", **DIVERGENCE_NAMES, mixture="sum of divergence.mixture"
    )
    beta: float = setting(
        0.5, "jsd: the target's weight; divergence=forward_kl is 0, reverse_kl is 1", "(0, 1)"
    )
    temperature: float | None = setting(
        None, "of both distributions in the loss; null: the served one", DIVISOR
    )
    mixture: dict[str, float] = setting(
        {}, "weights of a sum, as {forward_kl: 0.5, tvd: 0.5}, minimised whatever the name"
    )
    warmup_steps: int | None = setting(
        None, "of forward_kl first; null: a fifth after a cut under tvd or jsd, else 0", "[0, inf)"
    )
    tokens: str = choice(
        "all", "which tokens count", all="all", rejected="refused ones (source=replay)"
    )
    position_decay: float | None = setting(
        None, "weight of the next proposal; null: 0.7 in a pass, 0.8 in a head, else 1", "(0, 1]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.mixture.items():
            choices = ", ".join(DIVERGENCE_NAMES)
            self.require(name in DIVERGENCE_NAMES, "mixture", f"hold weights of {choices}")
            require(weight > 0, f"divergence.mixture.{name}", "be positive", weight)
        self.name = MIXTURE if self.mixture else self.name
        rule = "hold the weights where divergence.name=mixture"
        self.require(bool(self.mixture) or self.name != MIXTURE, "mixture", rule)

    @property
    def terms(self) -> dict[str, float]:
        """The divergences of the sum, by name, with their weights."""
        return self.mixture or {self.name: 1.0}

    @property
    def names(self) -> set[str]:
        """All divergences that some step takes."""
        return {*self.terms, *(["forward_kl"] if self.warmup_steps else [])}


@dataclass(kw_only=True)
class SourceConfig(Section, key="source"):
    """Whose sequences the divergence is taken on: the data's, the target's or the draft's."""

    name: str = choice("draft", "what the draft learns on", **SOURCE_NAMES)
    fraction: float = setting(
        0.5, "mix: GKD's lambda, the draft's share; source=target or fixed is 0, draft 1", "(0, 1)"
    )
    other: str = setting("target", "mix: the source of the rest", names=("target", "fixed"))
    refresh_steps: int = positive(1, "steps after which the draft's own texts are sampled anew")


@dataclass(kw_only=True)
class GenerateConfig(Section, key="generate"):
    """Target rollouts, stored once and shared by every experiment with the same settings."""

    rollouts: int = positive(1024, "training prompts that the target answers")
    batch_size: int = positive(128, "prompts at a time; of an engine: requests")
    top_k: int = setting(
        0,
        "likeliest ids stored with every token, to train without the target; 0: none. Of a teacher "
        "at target.urls, so many are asked for; 0: 20, vLLM's --max-logprobs",
        "[0, inf)",
    )
    hidden_states: bool = setting(
        False, "store beside them, in bfloat16, what a head reads of the target at every token"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        stored = self.top_k > 0 or not self.hidden_states
        self.require(stored, "hidden_states", "be false without generate.top_k")


def has_compiler() -> bool:
    """Whether the machine has what turns generated code into machine code."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


@dataclass(kw_only=True)
class OptimConfig(Section, key="optim"):
    """AdamW, warm-up and schedule, in optimizer steps. Names are those of `transformers`."""

    learning_rate: float | None = positive(
        None, "peak rate; null: inversely proportional to the draft's width"
    )
    lr_scheduler_type: str = choice(
        "cosine", "fall of the rate", cosine="to a tenth", linear="to 0", constant="not at all"
    )
    warmup_steps: int = setting(10, "steps in which the rate rises from 0", "[0, inf)")
    max_steps: int = positive(100, "optimizer steps of the run")
    per_device_train_batch_size: int = positive(16, "rows of a pass, in each process")
    gradient_accumulation_steps: int = positive(1, "passes of a step")
    max_grad_norm: float = setting(
        1.0, "norm that gradients are clipped to; .inf: none", "(0, inf]"
    )
    weight_decay: float = setting(0.0, "of AdamW", "[0, inf)")
    eval_steps: int = positive(50, "steps between two looks at alpha, whose best weights stay")
    save_steps: int = positive(100, "steps between two checkpoints, of which the last stays")
    logging_steps: int = positive(5, "steps between two records of the metrics")
    group_by_length: bool = setting(False, "a step has texts, or prompts, of like length")
    activation_checkpointing: bool = setting(
        False, "less memory, for a third more of the draft's work"
    )
    compile: str = choice(
        "auto",
        "compiled loss and sampling, and the target's texts",
        auto="in long runs",
        true="always",
        false="never",
    )

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML reads true and false as booleans
        super().__post_init__()

    @property
    def rows_of_a_process(self) -> int:
        """Rows of a step that one process has."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def compiles(self) -> bool:
        """Whether losses and sampling run as machine code; results differ by rounding."""
        return self.compiles_for(self.max_steps, WORTH_COMPILING)

    def compiles_for(self, steps: int, worth: int) -> bool:
        """Whether what takes so many `steps` is compiled, which `worth` steps pay for."""
        if self.compile == "auto":
            return steps >= worth and has_compiler()
        return self.compile == "true"
