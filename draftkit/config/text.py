"""Models, text, and the distribution under which the target is served."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftkit.config.choices import (
    DIVISOR,
    EXTRA_NAMES,
    REFUSE,
    Section,
    check_address,
    choice,
    positive,
    require,
    setting,
)

EMBEDDED = "draftkit/embedded"  # a small target that comes with the package, and its folder there
CORPUS, QUESTIONS, GSM8K = "draftkit/corpus", "draftkit/questions", "draftkit/gsm8k"
PACKAGED = {  # text that comes with it, and the domains of each
    CORPUS: ("python", "prose", "cpp"),
    QUESTIONS: (
        *("advice", "brainstorm", "classify", "code", "explain_code", "extract", "gsm8k", "math"),
        *("qa", "reasoning", "rewrite", "structured", "summarize", "translate", "writing"),
    ),
    GSM8K: ("gsm8k",),
}
KIND_NAMES = {  # of drafters; all after pard are heads on hidden states of the target
    "plain": "token by token",
    "pard": "all tokens in one pass",
    "eagle3": "a head on the target's hidden states, token by token or in one pass",
    "medusa": "a head on the target's hidden states for each token",
}
PLAIN, PARD, *HEADS = KIND_NAMES
GGUF, PACKAGE = ".gguf", "package:"  # what paths of such a file end and begin with


@dataclass(kw_only=True)
class PretrainConfig(Section, key="draft.pretrain"):
    """The Llama-type drafter that is built and trained where `draft.path` is null.

    Its feed-forward is twice as wide as it. A head is 64 wide, or a fourth of it if that is less.
    """

    num_hidden_layers: int = positive(2, "number of layers")
    hidden_size: int = positive(128, "width: a multiple of 64, or a smaller one of 4")
    max_steps: int = positive(400, "optimizer steps")
    per_device_train_batch_size: int = positive(8, "rows of a step, in each process")
    learning_rate: float = positive(2e-3, "peak rate of AdamW")

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
    """Low-rank updates (LoRA) in place of all weights of the draft."""

    rank: int = setting(0, "rank of the updates; 0: all weights are trained", "[0, inf)")


@dataclass(kw_only=True)
class ShrinkConfig(Section, key="draft.shrink"):
    """The draft that `prepare` cuts from the target, where `draft.path` is null."""

    layers: Any = setting([], "how many layers of the target, or which, from 0; 0: do not cut")
    vocabulary: int = setting(0, "most frequent ids, the only ones that it proposes; 0: all")
    steps: int = setting(0, "steps of plain training on `data` after the cut", "[0, inf)")

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

    tokens: int = setting(8, "proposals that it is trained for", "[2, 32]")
    plain_share: float | None = setting(
        None,
        "share of the steps, the first ones, in which a drafter that is not parallel yet learns "
        "its first proposal alone; null: 0.6 after a cut without training, else 0",
        "[0, 1)",
    )


@dataclass(kw_only=True)
class HeadConfig(Section, key="draft.head"):
    """A head on the target's hidden states (`draft.kind=eagle3` and `medusa`)."""

    steps: int = setting(4, "eagle3: steps unrolled in training", "[1, 16]")
    tokens: int = setting(8, "proposals of medusa, and of a parallel head", "[1, 32]")
    vocabulary: int | None = positive(
        None, "the target's most frequent ids, which it may propose; null: 32,000, or all of fewer"
    )
    parallel: bool = setting(False, "eagle3: all proposals in one pass (P-EAGLE)")


@dataclass(kw_only=True)
class ModelConfig(Section, key="model"):
    """A model."""

    path: str | None = setting(
        None, "a folder, hub name, GGUF file, or package:NAME with such a file; null: it is made"
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub; null: its main branch")
    trust_remote_code: bool = setting(False, "run the code that comes with the model")

    @property
    def named(self) -> str:
        """What a refusal begins with, as `target.path FOLDER`."""
        return f"{self.key}.path {self.path}"

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

    path: str | None = setting(
        EMBEDDED, f"as draft.path; {EMBEDDED}: a small one that comes with the package"
    )
    weights: str = choice(
        "auto",
        "in which it is served",
        auto="as they are",
        int4="rounded to 4 bits (groups of 32; not the output head): another model, and quicker on "
        "CPUs",
    )
    urls: list[str] = setting(
        [], "addresses of vLLM that serves it, and writes and scores texts (key: OPENAI_API_KEY)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.weights == "auto" or not self.urls
        self.require(own, "weights", "be auto with target.urls, which serve their own")
        for url in self.urls:
            rule = "be addresses of APIs, as http://127.0.0.1:8000"
            require(url.startswith(("http://", "https://")), "target.urls", rule, url)
            require("@" not in url, "target.urls", "hold no password", "...@...")


@dataclass(kw_only=True)
class DraftConfig(ModelConfig, key="draft"):
    """The model that proposes: where it begins, and what `distill` makes of it."""

    kind: str = choice(PLAIN, "how it proposes", **KIND_NAMES)
    extra_tokens: str = choice(
        REFUSE, "a draft that differs from the target in added tokens alone", **EXTRA_NAMES
    )
    accept_target: bool = setting(
        False, "serve and refit a head though its folder names another target, or none"
    )
    pard: PardConfig = field(default_factory=PardConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    shrink: ShrinkConfig = field(default_factory=ShrinkConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = f"draft.kind={self.kind}"
        for key, value in (("shrink.layers", self.shrink.layers), ("lora.rank", self.lora.rank)):
            require(not (self.is_head and value), f"draft.{key}", f"be 0 with {kind}", value)
        one_pass = self.kind == "medusa" and self.head.parallel
        require(not one_pass, "draft.head.parallel", f"be false with {kind}", self.head.parallel)

    @property
    def is_head(self) -> bool:
        """Whether its kind is one that reads the target's hidden states."""
        return self.kind in HEADS

    @property
    def is_untrained(self) -> bool:
        """Whether it is made of the target's weights and not trained: it agrees with it on next to
        nothing."""
        cut = bool(self.shrink.layers) and not self.shrink.steps
        return self.path is None and (self.is_head or cut)


@dataclass(kw_only=True)
class DataConfig(Section, key="data"):
    """Where text comes from and how a row becomes prompt and completion."""

    name: str = choice(
        "local", "what `path` names", local=f"a file, or {', '.join(PACKAGED)}", hub="a data set"
    )
    path: str | None = setting(
        CORPUS, "the file (JSONL, Parquet, text), the address of parts (s3://...), or the data set"
    )
    subset: str | None = setting(None, "of a data set on the hub: its configuration")
    split: str = setting("train", "of a data set on the hub: the split that is read")
    domains: list[str] | None = setting(
        None, "of the package's texts: those that are read, as [code, math]; null: all", filled=True
    )
    max_rows: int | None = positive(None, "the first rows of the file or data set; null: all")
    max_bad_rows: float = setting(
        0.01, "share of rows that may be unusable, and are left out", "[0, 1]"
    )
    prompt_column: str | None = setting(None, "of prompts; null: as in docs/training.md")
    completion_column: str | None = setting(None, "of answers; null: likewise")
    chat_template: str = choice(
        "auto", "prompts that are strings", auto="user turns, given a template", never="as they are"
    )
    system: str | None = setting(None, "a system turn in front of every chat that has none")
    template_options: dict[str, Any] = setting({}, "of the template: {enable_thinking: false}")
    max_prompt_tokens: int = positive(
        1024, "longest prompt, at most a model's context; chats lose old turns, others their start"
    )
    max_completion_tokens: int = positive(1024, "longest answer, at most a model's context")
    max_length: int = setting(1024, "of plain text: tokens of a window, its prompt included")
    prompt_tokens: int = setting(32, "of plain text: tokens of a window's prompt", "[1, inf)")
    validation_fraction: float = setting(
        0.05, "share of documents to select by; the package's texts are split already", "(0, 1)"
    )
    test_fraction: float = setting(
        0.05, "share of documents for all results: 0.9 judges by nearly a whole file", "(0, 1)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        exceeds = self.max_length > self.prompt_tokens
        self.require(exceeds, "max_length", "exceed data.prompt_tokens")
        rule = f"leave text to train on, beside data.validation_fraction={self.validation_fraction}"
        self.require(self.test_fraction + self.validation_fraction < 1, "test_fraction", rule)
        known = PACKAGED[str(self.path)] if self.is_packaged else ()
        rule = f"name domains of {self.path}: {', '.join(known)}"
        rule = rule if known else "be null: it is of the package's texts alone"
        self.require({*(self.domains or ())} <= {*known}, "domains", rule)
        if self.is_remote:
            check_address("data.path", str(self.path))

    @property
    def file(self) -> Path:
        """The file that `path` names where `name` is `local`."""
        if self.is_packaged:
            return Path(__file__).parents[1] / "data" / f"{Path(str(self.path)).name}.parquet"
        return Path(str(self.path))

    @property
    def is_remote(self) -> bool:
        """Whether `path` is the address of a folder of parts, as `online.sink` writes them."""
        return self.name == "local" and "://" in str(self.path)

    @property
    def is_packaged(self) -> bool:
        """Whether the text comes with the package."""
        return self.name == "local" and self.path in PACKAGED


@dataclass(kw_only=True)
class SamplingConfig(Section, key="sampling"):
    """The served distribution: the only temperature, top-k, top-p and penalty there are."""

    temperature: float = setting(1.0, "divides the logits; 0: greedy", DIVISOR, also=0)
    top_k: int = setting(0, "keeps so many of the likeliest tokens; 0: all", "[0, inf)")
    top_p: float = setting(1.0, "keeps the likeliest tokens up to this probability", "[1e-06, 1]")
    repetition_penalty: float = positive(
        1.0, "divides logits above 0 of tokens that the text has, multiplies those below; 1: none"
    )


# A key of commands that no field of Python can have.
SAMPLING_FROM = choice(
    "config",
    "what stands for these settings where they are not set (`--help`: null)",
    config="their defaults",
    model="the target's generation_config.json, where it has them",
)
SAMPLING_FROM.type = str
