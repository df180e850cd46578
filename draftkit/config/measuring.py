"""How the pair decodes, and what is measured of it."""

from dataclasses import asdict, dataclass, field

from draftkit.config.choices import (
    BENCHMARK_METHOD_NAMES,
    BENCHMARK_METHODS,
    CODE_NAMES,
    DRAFT_ROLES,
    DRAFTED_NAMES,
    GPU_PARTS,
    PROPOSER_ALIASES,
    PROPOSER_NAMES,
    SUBJECT_NAMES,
    VERIFICATION_NAMES,
    WEIGHT_NAMES,
    require,
    require_choice,
    require_positive,
)

MIN_CHUNKS = 6  # of timed prompts: fewer admit no 95 % interval of a median


@dataclass(kw_only=True)
class DecodeConfig:
    """Speculative decoding: tokens proposed per round, how they are verified, and by what code."""

    gamma: int = 4
    # Who proposes: the draft (`sampled` as the target is served, or its `argmax`; `hybrid`: prompt
    # lookup where it has a match; `staged`: the draft decodes speculatively in turn), counts of the
    # training text (`unigram`, `bigram`, `ngram`), `prompt_lookup`, or `none`: gamma is 0.
    proposer: str = "sampled"
    verification: str = "speculative"
    # captured: CUDA graphs of eager code, ready at once, where compiling takes its time for every
    # shape of a round (without CUDA: false). auto: a server on CUDA captures and one on a CPU does
    # neither; compiled wherever decoding itself is what is measured.
    compile: str = "auto"

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML reads true and false as booleans
        require(0 <= self.gamma <= 32, "decode.gamma", "lie in 0..32", self.gamma)
        self.proposer = PROPOSER_ALIASES.get(self.proposer, self.proposer)
        require_choice("decode.proposer", self.proposer, PROPOSER_NAMES)
        if self.proposer == "none":
            self.gamma = 0
        require_choice("decode.verification", self.verification, VERIFICATION_NAMES)
        require_choice("decode.compile", self.compile, CODE_NAMES)

    @property
    def has_drafter(self) -> bool:
        """Whether a draft model has a part in what is proposed."""
        return self.proposer in DRAFTED_NAMES

    @property
    def compiles(self) -> bool:
        """Whether code is compiled where decoding itself is what is measured."""
        return self.compile in ("auto", "true")

    @property
    def captures(self) -> bool:
        """Whether eager code is captured there instead."""
        return self.compile == "captured"


@dataclass(kw_only=True)
class EvaluateConfig:
    """Held-out prompts, context length, timing effort and the bootstrap."""

    draft: str = "trained"  # `trained`: what `distill` made; `given`: `draft.path` itself
    temperatures: list[float] | None = None  # null: the served one
    prompts: int = 96
    max_new_tokens: int = 64
    batch_size: int = 32
    validation_prompts: int = 48  # of the selection in `distill`; the first of them calibrate
    timing_prompts: int = 24  # a verdict rests on MIN_CHUNKS batches of them or more
    timing_batch_size: int = 1
    calibration_turns: int = 12  # bursts of rounds by which c, v and o are measured
    lossless_prompts: int = 32
    bootstrap: int = 2000

    def __post_init__(self) -> None:
        require_choice("evaluate.draft", self.draft, DRAFT_ROLES)
        counts = [name for name, value in asdict(self).items() if isinstance(value, int)]
        require_positive(self, "evaluate", *counts)
        least = MIN_CHUNKS * self.timing_batch_size
        rule = f"be at least {least}, {MIN_CHUNKS} batches of evaluate.timing_batch_size"
        for name in ("timing_prompts", "prompts"):
            value = getattr(self, name)
            require(value >= least, f"evaluate.{name}", rule, value)
        for temperature in self.temperatures or []:
            require(temperature >= 0, "evaluate.temperatures", "be at least 0", temperature)


@dataclass(kw_only=True)
class BenchmarkConfig:
    """Which ways to decode are timed beside each other, and on how much."""

    # distill: training steps beside TRL's, and the loss in chunks; gpu: all that needs a GPU
    subject: str = "decoder"
    weights: str = "pair"  # random: models of the `pretrain` shapes instead, for speed alone
    methods: list[str] = field(default_factory=lambda: list(BENCHMARK_METHODS))
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    compiled_batch_sizes: list[int] = field(default_factory=lambda: [1])  # the rest runs eagerly
    prompts: int = 24  # of each setting; more where a batch size would make too few chunks of them
    max_new_tokens: int = 64
    warm_steps: int = 4  # subject=distill: steps that do not count, and those that do
    steps: int = 20
    loss_tokens: int = 2048  # of the loss that is taken in chunks and whole
    loss_vocab_size: int = 152_064

    def __post_init__(self) -> None:
        require_choice("benchmark.subject", self.subject, SUBJECT_NAMES)
        require_choice("benchmark.weights", self.weights, WEIGHT_NAMES)
        self.methods = [PROPOSER_ALIASES.get(name, name) for name in self.methods]
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
        require_positive(self, "benchmark", "prompts", "max_new_tokens", "warm_steps")
        require_positive(self, "benchmark", "loss_tokens", "loss_vocab_size")
        require(self.steps >= 2, "benchmark.steps", "be at least 2", self.steps)


@dataclass(kw_only=True)
class GpuConfig:
    """What of all that needs a GPU is measured (`benchmark.subject=gpu`), and in how long."""

    parts: list[str] = field(default_factory=lambda: list(GPU_PARTS))
    rehearse: bool = False  # every part on a CPU, in tiny shapes: its numbers mean nothing
    seconds: float = 520.0  # for all parts together; the limit of each is a share of it

    def __post_init__(self) -> None:
        for part in self.parts:
            require_choice("gpu.parts", part, GPU_PARTS)
        fits = 0 < len(self.parts) == len(set(self.parts))
        require(fits, "gpu.parts", "name at least one, none twice", self.parts)
        require_positive(self, "gpu", "seconds")
