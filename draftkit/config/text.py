"""Models, text, and the distribution under which the target is served."""

from dataclasses import asdict, dataclass, field

from draftkit.config.choices import (
    DATA_NAMES,
    DOMAIN_NAMES,
    OVERLONG_NAMES,
    require,
    require_choice,
    require_positive,
)


@dataclass(kw_only=True)
class PretrainConfig:
    """The Llama-type model that is built and trained where `path` is null."""

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
class LoraConfig:
    """How `distill` trains the draft: rank 0 trains all weights, another one updates of it."""

    rank: int = 0
    alpha: float = 16.0  # updates are scaled by alpha / rank
    dropout: float = 0.0
    target_modules: list[str] | None = None  # null: all linear layers but the head

    def check(self) -> None:
        """Raise ValueError naming the key under `draft` that is out of range."""
        require(self.rank >= 0, "draft.lora.rank", "be at least 0 (0: no LoRA)", self.rank)
        require(self.alpha > 0, "draft.lora.alpha", "be positive", self.alpha)
        require(0 <= self.dropout < 1, "draft.lora.dropout", "lie in [0, 1)", self.dropout)
        names = self.target_modules
        fits = names is None or 0 < len(names) == len(set(names))
        require(fits, "draft.lora.target_modules", "name at least one, none twice", names)


@dataclass(kw_only=True)
class ShrinkConfig:
    """The draft that `prepare` cuts from the target, where `draft.path` is null."""

    layers: list[int] = field(default_factory=list)  # of the target, from 0; empty: do not cut
    vocabulary: int = 0  # most frequent ids that the draft may propose; 0: all

    def check(self) -> None:
        """Raise ValueError naming the key under `draft` that is out of range."""
        ascend = self.layers == sorted(set(self.layers)) and min(self.layers, default=0) >= 0
        require(ascend, "draft.shrink.layers", "be numbers from 0, ascending", self.layers)
        require(
            self.vocabulary == 0 or (self.vocabulary > 0 and bool(self.layers)),
            "draft.shrink.vocabulary",
            "be 0, or positive beside draft.shrink.layers",
            self.vocabulary,
        )


@dataclass(kw_only=True)
class ModelConfig:
    """One model: a local folder or hub name, or null for one that is made first."""

    path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    freeze_head: bool = False  # draft: the output head, and embeddings tied to it, do not learn
    lora: LoraConfig = field(default_factory=LoraConfig)
    shrink: ShrinkConfig = field(default_factory=ShrinkConfig)

    def check(self, section: str) -> None:
        """Raise ValueError naming the key under `section` (`target` or `draft`) that is wrong."""
        self.pretrain.check(section)
        if section == "target":
            rule = "stay as it is, since only the draft is trained and cut"
            require(self.lora.rank == 0, "target.lora.rank", rule, self.lora.rank)
            require(not self.shrink.layers, "target.shrink.layers", rule, self.shrink.layers)
        self.lora.check()
        self.shrink.check()
        require(
            self.path is None or not self.shrink.layers,
            "draft.shrink.layers",
            "be empty where draft.path names the drafter",
            self.shrink.layers,
        )


def embedded_draft() -> ModelConfig:
    """The drafter that `prepare` makes."""
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
    vocab_size: int = 4096  # of the tokenizer that `texts` trains
    prompt_column: str | None = None
    completion_column: str | None = None
    prompt_tokens: int = 32  # the prompt of a `text` row
    max_length: int = 128  # tokens of prompt and completion together
    overlong: str = "cut"  # drop: rows longer than that are left out
    packing: bool = False  # train on rows of several texts, which do not see each other
    validation_fraction: float = 0.05
    test_fraction: float = 0.05

    def __post_init__(self) -> None:
        require_choice("data.name", self.name, DATA_NAMES)
        require_choice("data.overlong", self.overlong, OVERLONG_NAMES)
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
