"""Models, text, and the distribution under which the target is served."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftkit.config.choices import (
    DOMAIN_NAMES,
    NEVER,
    REFUSE,
    Section,
    positive,
    require,
    setting,
    temperature,
)

EMBEDDED = "draftkit/embedded"  # a small target that comes with the package, and its folder there
CORPUS = "draftkit/corpus"  # texts of three domains that come with it
QUESTIONS = "draftkit/questions"  # chats that come with it
HEADS = ("eagle3", "medusa")  # kinds of drafters that read a target's hidden states
GGUF, PACKAGE = ".gguf", "package:"  # what paths of such a file end and begin with


@dataclass(kw_only=True)
class PretrainConfig(Section, key="draft.pretrain"):
    """The Llama-type drafter that is built and trained where `draft.path` is null.

    Its feed-forward is twice as wide as it. A head is 64 wide, or a fourth of it if that is less.
    """

    num_hidden_layers: int = positive(2)
    hidden_size: int = positive(128)
    max_steps: int = positive(400)
    per_device_train_batch_size: int = positive(8)
    learning_rate: float = positive(2e-3)

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.hidden_size % 4 == 0 and self.hidden_size % self.heads == 0
        self.require(whole, "hidden_size", "be a multiple of 64, or a smaller one of 4")

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(4, self.hidden_size // 64)


@dataclass(kw_only=True)
class LoraConfig(Section, key="draft.lora"):
    """How `distill` trains the draft: rank 0 trains all weights, another one updates of it."""

    rank: int = setting(0, least=0, hint=" (0: no LoRA)")


@dataclass(kw_only=True)
class ShrinkConfig(Section, key="draft.shrink"):
    """The draft that `prepare` cuts from the target, where `draft.path` is null."""

    # How many of the target's, as `models.shrink` chooses them, or their numbers from 0, ascending;
    # empty or 0: do not cut.
    layers: Any = field(default_factory=list)
    vocabulary: int = 0  # most frequent ids that the draft may propose; 0: all
    # Of plain training on the text of `data` after the cut, in all else as `draft.pretrain` says.
    steps: int = setting(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        cuts, numbers = bool(self.layers), self.layers
        numbers = numbers if isinstance(numbers, list) else [numbers]
        whole = all(type(one) is int and one >= 0 for one in numbers)
        rule = "be a number of layers, or numbers from 0, ascending"
        self.require(whole and numbers == sorted({*numbers}), "layers", rule)
        fits = self.vocabulary == 0 or (self.vocabulary > 0 and cuts)
        self.require(fits, "vocabulary", "be 0, or positive beside draft.shrink.layers")
        self.require(cuts or not self.steps, "steps", "be 0 without draft.shrink.layers")


@dataclass(kw_only=True)
class PardConfig(Section, key="draft.pard"):
    """A drafter that proposes in one pass (`draft.kind=pard`)."""

    tokens: int = setting(8, least=2, most=32)  # proposals that it is trained for
    # Of a drafter that is not parallel yet: the share of the steps that comes first and teaches the
    # first proposal alone, which is faster. null: 0.6 where it was cut and not trained, else 0.
    plain_share: float | None = setting(None, least=0, below=1)


@dataclass(kw_only=True)
class HeadConfig(Section, key="draft.head"):
    """A head on the target's hidden states (`draft.kind=eagle3` and `medusa`)."""

    steps: int = setting(4, least=1, most=16)  # of eagle3: unrolled in training
    tokens: int = setting(8, least=1, most=32)  # proposals of medusa, and of a parallel head
    # Ids that it proposes, the most frequent in texts of the target; null: 32,000, or all of fewer
    vocabulary: int | None = positive(None)
    parallel: bool = False  # eagle3: all proposals in one pass (P-EAGLE)


@dataclass(kw_only=True)
class ModelConfig(Section, key="model"):
    """A model: a local folder, a hub name or `draftkit/embedded`; null: a drafter to be made.

    Commands also take a GGUF file, or `package:NAME`, the one that an installed package holds.
    """

    path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def location(self) -> str:
        """The folder or hub name of a model that `path` names."""
        assert self.path is not None
        if self.path == EMBEDDED:
            return str(Path(__file__).parents[1] / "embedded")
        return self.path

    @property
    def names_gguf(self) -> bool:
        """Whether `path` names a GGUF file, which is a folder before anything loads it."""
        path = self.path or ""
        return path.startswith(PACKAGE) or (path.endswith(GGUF) and not Path(path).is_dir())


@dataclass(kw_only=True)
class TargetConfig(ModelConfig, key="target"):
    """The model that is served, which never learns."""

    path: str | None = EMBEDDED


@dataclass(kw_only=True)
class DraftConfig(ModelConfig, key="draft"):
    """The model that proposes: where it begins, and what `distill` makes of it."""

    # plain: proposes token by token; pard: all in one pass; eagle3, medusa: a head on the target's
    # hidden states
    kind: str = setting("plain", names=("plain", "pard", *HEADS))
    # A draft whose vocabulary differs from the target's in added tokens alone: never: it is taken,
    # and never proposes them
    extra_tokens: str = setting(REFUSE, names=(REFUSE, NEVER))
    # Serve and refit a head (eagle3, medusa) though its folder names another target, or none.
    accept_target: bool = False
    pard: PardConfig = field(default_factory=PardConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    shrink: ShrinkConfig = field(default_factory=ShrinkConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = f"draft.kind={self.kind}"
        for key, value, only in (
            ("draft.shrink.layers", self.shrink.layers, 0),
            ("draft.lora.rank", self.lora.rank, 0),
        ):
            require(not (self.is_head and value), key, f"be {only} with {kind}", value)
        one_pass = self.kind == "medusa" and self.head.parallel
        require(not one_pass, "draft.head.parallel", f"be false with {kind}", self.head.parallel)

    @property
    def is_head(self) -> bool:
        """Whether its kind is one that reads the target's hidden states."""
        return self.kind in HEADS

    @property
    def pass_tokens(self) -> int | None:
        """Proposals of one pass, as it is trained; None where it proposes token by token."""
        if self.kind == "pard":
            return self.pard.tokens
        one_pass = self.kind == "medusa" or (self.kind == "eagle3" and self.head.parallel)
        return self.head.tokens if one_pass else None

    @property
    def is_untrained(self) -> bool:
        """Whether it is made of the target's weights and not trained: it agrees with it on next to
        nothing."""
        cut = bool(self.shrink.layers) and not self.shrink.steps
        return self.path is None and (self.is_head or cut)


@dataclass(kw_only=True)
class DataConfig(Section, key="data"):
    """Where text comes from and how a row becomes prompt and completion.

    `local`: `path` is a JSONL, Parquet or text file, or one that comes with the package:
    `draftkit/corpus`, `draftkit/questions`. `hub`: `path` is a dataset name.
    """

    name: str = setting("local", names=("local", "hub"))
    path: str | None = CORPUS
    subset: str | None = None
    split: str = "train"
    # Of `draftkit/corpus`.
    domains: list[str] = setting(DOMAIN_NAMES, names=DOMAIN_NAMES, filled=True)
    max_rows: int | None = positive(None)  # the first of the file or data set; null: all
    # The share of rows up to which those that cannot be used are left out, and counted.
    max_bad_rows: float = setting(0.01, least=0, most=1)
    prompt_column: str | None = None
    completion_column: str | None = None
    # Prompts that are strings: a user turn where the tokenizer has a chat template (auto), or as
    # they are, special tokens included (never).
    chat_template: str = setting("auto", names=("auto", "never"))
    system: str | None = None  # a system turn in front of every chat that has none
    # Variables of the template, as {enable_thinking: false}.
    template_options: dict[str, Any] = field(default_factory=dict)
    # Of chats and of rows with a prompt, at most; less where the context of a model is smaller.
    # Chats lose their oldest turns (one whose last turn is too long is left out), other prompts
    # their left.
    max_prompt_tokens: int = positive(1024)
    max_completion_tokens: int = positive(1024)
    # Of plain text: its windows, and how much of each is the prompt.
    max_length: int = 1024
    prompt_tokens: int = setting(32, least=1)
    # Of the documents; texts that come with the package have a split of their own.
    validation_fraction: float = setting(0.05, above=0, below=0.5)
    test_fraction: float = setting(0.05, above=0, below=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        exceeds = self.max_length > self.prompt_tokens
        self.require(exceeds, "max_length", "exceed data.prompt_tokens")

    @property
    def file(self) -> Path:
        """The file that `path` names where `name` is `local`."""
        if self.is_packaged:
            return Path(__file__).parents[1] / "data" / f"{Path(str(self.path)).name}.parquet"
        return Path(str(self.path))

    @property
    def is_packaged(self) -> bool:
        """Whether the text comes with the package."""
        return self.name == "local" and self.path in (CORPUS, QUESTIONS)


@dataclass(kw_only=True)
class SamplingConfig(Section, key="sampling"):
    """The served distribution: the only temperature, top-k, top-p and penalty there are.

    By `sampling.from=model` a command takes those that are not set (`--help` shows null) from the
    target's generation_config.json, where it has them; here they are what came out.
    """

    temperature: float = temperature(1.0)
    top_k: int = setting(0, least=0, hint=" (0 keeps all)")
    top_p: float = setting(1.0, above=0, most=1)
    repetition_penalty: float = positive(1.0)
