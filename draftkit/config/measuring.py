"""How the pair decodes, what is measured of it, and what is written for other engines."""

from dataclasses import dataclass

from draftkit.config.choices import (
    DIVISOR,
    DRAFTED_NAMES,
    DTYPE_NAMES,
    PROPOSER_NAMES,
    TREE_NAMES,
    TYPICAL,
    VERIFICATION_NAMES,
    Section,
    choice,
    positive,
    setting,
)

UNMEASURED_GAMMA = 4


@dataclass(kw_only=True)
class DecodeConfig(Section, key="decode"):
    """Speculative decoding: tokens proposed per round, how they are verified, and by what code."""

    gamma: int | str = setting(
        4,
        "tokens proposed a round (K); auto: `evaluate` finds what pays most, else 4, "
        "or what a parallel drafter learned",
        "[0, 32]",
        also="auto",
    )
    proposer: str = choice("sampled", "who proposes", **PROPOSER_NAMES)
    draft_gamma: int | None = positive(
        None,
        "tokens that the drafter of a hybrid proposes, at most K; null, or on CUDA: K; with "
        "gamma=auto `evaluate` finds this and lookup_min",
    )
    lookup_min: int = setting(
        2, "how many last tokens must occur earlier in the text before a hybrid guesses", "[1, 3]"
    )
    verification: str = choice("speculative", "what is accepted", **VERIFICATION_NAMES)
    typical_epsilon: float = setting(0.09, "epsilon of verification=typical", "(0, 1]")
    tree: int = setting(
        0, "nodes of a tree of proposals, gamma deep (not with block); 0: a chain", "[0, 64]"
    )
    compile: str = choice(
        "auto",
        "the code of a round",
        auto="compiled where decoding is measured; a server on CUDA captures, on a CPU is eager",
        true="compiled, which takes its time for every shape",
        false="eager",
        captured="CUDA graphs of eager code, ready at once; without CUDA eager",
    )

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML reads true and false as booleans
        super().__post_init__()
        if self.proposer == "none":
            self.gamma = 0
        elif isinstance(self.gamma, int):
            rule = f"be at most decode.gamma={self.gamma}"
            self.require((self.draft_gamma or 0) <= self.gamma, "draft_gamma", rule)
        if self.tree > 0:
            rule = "be sampled or argmax with decode.tree, which needs a law of every depth"
            self.require(self.proposer in TREE_NAMES, "proposer", rule)
            rule = "be speculative, match or typical with decode.tree: block judges one chain"
            self.require(self.verification != "block", "verification", rule)

    @property
    def proposals(self) -> int:
        """Tokens that a plain drafter proposes a round, where the best number is not measured."""
        return self.gamma if isinstance(self.gamma, int) else UNMEASURED_GAMMA

    @property
    def is_lossy(self) -> bool:
        """Whether answers may have another law than the target's."""
        return self.verification == TYPICAL

    @property
    def epsilon(self) -> float | None:
        """That of typical acceptance; None where verification is exact."""
        return self.typical_epsilon if self.is_lossy else None

    @property
    def has_drafter(self) -> bool:
        """Whether a draft model has a part in what is proposed."""
        return self.proposer in DRAFTED_NAMES


@dataclass(kw_only=True)
class EvaluateConfig(Section, key="evaluate"):
    """Held-out prompts, context length and timing effort."""

    draft: str = choice(
        "trained", "what is judged", trained="what `distill` made", given="draft.path itself"
    )
    temperatures: list[float] | None = setting(
        None, "a list of those to judge at; null: the served one", DIVISOR, also=0
    )
    prompts: int = positive(96, "test prompts on which alpha is measured")
    max_new_tokens: int = positive(256, "longest answer")
    batch_size: int = positive(32, "rows at a time where nothing is timed")
    validation_prompts: int = positive(
        48, "prompts of validation, to select by in `distill`; the first of them calibrate"
    )
    timing_prompts: int = positive(
        192, "test prompts that are timed; a verdict needs 20 documents, or batches, of them"
    )
    timing_minutes: float = positive(
        10.0, "minutes a temperature, after which timing ends; compiling is not in them"
    )
    timing_batch_size: int = positive(1, "rows decoded together while they are timed")
    lossless: str = choice(
        "auto",
        "precision in which greedy answers are compared with the target's own",
        auto="float32 where it fits",
        float32="the sharper one",
        served="the served one, which takes no memory beyond",
        off="not compared",
    )

    def __post_init__(self) -> None:
        if str(self.lossless).lower() == "false":
            self.lossless = "off"  # which YAML reads as a boolean
        super().__post_init__()


@dataclass(kw_only=True)
class ExportConfig(Section, key="export"):
    """A drafter for other engines: a plain folder, and how each loads and starts it."""

    dtype: str | None = setting(
        None, "of the plain folder; null: as stored (engines use the target's)", names=DTYPE_NAMES
    )
    push_to_hub: str | None = setting(
        None, "ORG/NAME on the hub, where the plain folder is also uploaded"
    )


@dataclass(kw_only=True)
class EngineConfig(Section, key="engine"):
    """A server of vLLM, SGLang or llama.cpp that runs. `measure_engine` must be its only client."""

    url: str | None = setting(None, "its address, as http://127.0.0.1:8000")
