"""What the draft learns from, by which divergence, and how fast."""

import os
import shutil
from dataclasses import dataclass, field

from draftkit.config.choices import (
    DIVERGENCE_NAMES,
    MIXTURE,
    SOURCE_NAMES,
    Section,
    positive,
    require,
    setting,
    temperature,
)

WORTH_COMPILING = 200  # steps


@dataclass(kw_only=True)
class DivergenceConfig(Section, key="divergence"):
    """What `distill` minimises, and on which tokens. `temperature` null means the served one."""

    # forward_kl: KL(target || draft), covers everything that the target may say. reverse_kl:
    # KL(draft || target), avoids what it would not say. jsd: generalised Jensen-Shannon. tvd: total
    # variation = 1 - alpha, whose gradient vanishes at low overlap. neg_log_alpha: -log alpha,
    # whose gradient does not. lk_hybrid: KL that turns into TVD as alpha grows. ce_argmax:
    # cross-entropy to the target's most likely token, for greedy serving and for
    # decode.proposer=argmax. next_token: plain training on the tokens themselves, the control.
    name: str = setting("forward_kl", names=(*DIVERGENCE_NAMES, MIXTURE))
    beta: float = setting(  # jsd: weight of the target in the mixture
        0.5,
        above=0,
        below=1,
        hint="; for the ends use divergence=forward_kl (0) or reverse_kl (1)",
    )
    temperature: float | None = temperature(None, greedy=False)
    # Weights of a sum of divergences, as {forward_kl: 0.5, tvd: 0.5}: it is minimised then,
    # whatever the name, which becomes `mixture`.
    mixture: dict[str, float] = field(default_factory=dict)
    # Of forward_kl, before all else. null: a fifth of `optim.max_steps` for a drafter that was cut
    # and not trained, under a divergence whose gradient vanishes there, else 0.
    warmup_steps: int | None = setting(None, least=0)
    tokens: str = setting("all", names=("all", "rejected"))
    # Weight of a proposal over the one before it, in a block (source=block) and in the chains of
    # a parallel drafter; null: 0.7 for the latter, else 1
    position_decay: float | None = setting(None, above=0, most=1)

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
    """Whose sequences the divergence is taken on: the data's, the target's or the draft's.

    What the draft has a part in is sampled anew every `refresh_steps` steps, so it is at most
    `refresh_steps` - 1 steps old.
    """

    # fixed: the data's own completions. target: the target's rollouts of the prompts, which
    # `generate` makes once and shares. draft: samples of the current draft, on its policy. mix: its
    # samples among the target's rollouts. block: what a server sees, decode.gamma tokens of the
    # current draft after a piece of the target's rollout. replay: texts of speculative decoding
    # with the current draft, which know where a proposal was refused.
    name: str = setting("draft", names=SOURCE_NAMES)
    fraction: float = setting(  # mix: how much the draft samples (GKD's lambda)
        0.5,
        above=0,
        below=1,
        hint="; for the ends use source=target or fixed (0) or draft (1)",
    )
    other: str = setting("target", names=("target", "fixed"))  # mix: where the rest comes from
    refresh_steps: int = positive(1)


@dataclass(kw_only=True)
class GenerateConfig(Section, key="generate"):
    """Target rollouts, stored once and shared by every experiment with the same settings.

    Our decoder makes them, or vLLM or SGLang that serves the target over HTTP. A key is
    read from the environment variable OPENAI_API_KEY alone.
    """

    rollouts: int = positive(1024)
    batch_size: int = positive(128)  # prompts at a time; of an engine: requests
    # Ids of the target stored for every token, to train without it; 0: none.
    top_k: int = setting(0, least=0, hint=" (0 stores none)")
    # With these, in bfloat16, what a head reads of the target at every token.
    hidden_states: bool = False
    url: str | None = None  # of an engine, as http://127.0.0.1:8000/v1; null: our decoder
    model: str | None = None  # the name that the engine serves; null: `target.path`

    def __post_init__(self) -> None:
        super().__post_init__()
        url = self.url or "http://"
        rule = "be the address of an API, as http://127.0.0.1:8000/v1"
        self.require(url.startswith(("http://", "https://")), "url", rule)
        stored = self.top_k > 0 or not self.hidden_states
        self.require(stored, "hidden_states", "be false without generate.top_k")
        require("@" not in url, "generate.url", "hold no password", "...@...")

    @property
    def by_engine(self) -> bool:
        """Whether an engine makes the rollouts."""
        return self.url is not None


def has_compiler() -> bool:
    """Whether the machine has what turns generated code into machine code."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


@dataclass(kw_only=True)
class OptimConfig(Section, key="optim"):
    """AdamW, warm-up and schedule, in optimizer steps. Names are those of `transformers`.

    A step sees processes x gradient_accumulation_steps x per_device_train_batch_size rows.
    """

    # null: by the draft's width, see `learning_rate_for`
    learning_rate: float | None = positive(None)
    lr_scheduler_type: str = setting("cosine", names=("cosine", "linear", "constant"))
    warmup_steps: int = setting(10, least=0)
    max_steps: int = positive(100)
    per_device_train_batch_size: int = positive(16)
    gradient_accumulation_steps: int = positive(1)
    max_grad_norm: float = positive(1.0)
    weight_decay: float = setting(0.0, least=0)
    eval_steps: int = positive(50)
    save_steps: int = positive(100)  # a checkpoint of 0.6 B weights has 7 GB; the last one stays
    logging_steps: int = positive(5)
    group_by_length: bool = False  # texts (prompts, where the draft samples) of like length a step
    activation_checkpointing: bool = False  # less memory for a third more of the draft's work
    # auto: where there is a C++ compiler and the run is long enough to earn back half a minute
    compile: str = setting("auto", names=("auto", "true", "false"))

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
        if self.compile == "auto":
            return self.max_steps >= WORTH_COMPILING and has_compiler()
        return self.compile == "true"
