"""How the pair decodes, what is measured of it, and what is written for other engines."""

from dataclasses import dataclass

from draftkit.config.choices import (
    DRAFTED_NAMES,
    DTYPE_NAMES,
    PROPOSER_NAMES,
    TREE_NAMES,
    TYPICAL,
    VERIFICATION_NAMES,
    Section,
    positive,
    setting,
    temperature,
)

UNMEASURED_GAMMA = 4


@dataclass(kw_only=True)
class DecodeConfig(Section, key="decode"):
    """Speculative decoding: tokens proposed per round, how they are verified, and by what code."""

    # auto: `evaluate` finds the number that pays most, on other prompts than those that it times;
    # where nothing is measured it is 4, or what a parallel drafter is trained for.
    gamma: int | str = setting(4, least=0, most=32, word="auto")
    # Who proposes: the draft (`sampled` as the target is served, or its `argmax`; `hybrid`: prompt
    # lookup where it has a match; `staged`: the draft decodes speculatively in turn), counts of the
    # training text (`unigram`, `bigram`, `ngram`), `prompt_lookup`, or `none`: gamma is 0.
    proposer: str = setting("sampled", names=PROPOSER_NAMES)
    # typical is lossy: it keeps what the target might have said (Medusa), and is never deployed.
    verification: str = setting("speculative", names=VERIFICATION_NAMES)
    typical_epsilon: float = setting(0.09, above=0, most=1.0)
    # Nodes of a tree of proposals, as many of them in a path as gamma says; 0: a chain. A tree is
    # verified by the target's own samples (`match`), or typically.
    tree: int = setting(0, least=0, most=64)
    # captured: CUDA graphs of eager code, ready at once, where compiling takes its time for every
    # shape of a round (without CUDA: false). auto: a server on CUDA captures and one on a CPU does
    # neither; compiled wherever decoding itself is what is measured.
    compile: str = setting("auto", names=("auto", "true", "false", "captured"))

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML reads true and false as booleans
        super().__post_init__()
        if self.proposer == "none":
            self.gamma = 0
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

    @property
    def compiles(self) -> bool:
        """Whether code is compiled where decoding itself is what is measured."""
        return self.compile in ("auto", "true")

    @property
    def captures(self) -> bool:
        """Whether eager code is captured there instead."""
        return self.compile == "captured"


@dataclass(kw_only=True)
class EvaluateConfig(Section, key="evaluate"):
    """Held-out prompts, context length and timing effort."""

    # trained: what `distill` made; given: `draft.path` itself
    draft: str = setting("trained", names=("trained", "given"))
    temperatures: list[float] | None = temperature(None)  # null: the served one
    prompts: int = positive(96)
    max_new_tokens: int = positive(256)
    batch_size: int = positive(32)
    # Of the selection in `distill`; the first of them calibrate.
    validation_prompts: int = positive(48)
    # A verdict needs 20 documents of them, or 20 batches where rows are decoded together. Timing
    # ends sooner after so many minutes for each temperature.
    timing_prompts: int = positive(192)
    timing_minutes: float = positive(10.0)
    timing_batch_size: int = positive(1)
    # The identity check: in float32, which is the sharper; in the dtype that is served, which takes
    # no memory beyond; auto: float32 where it fits.
    lossless: str = setting("auto", names=("auto", "float32", "served", "off"))

    def __post_init__(self) -> None:
        if str(self.lossless).lower() == "false":
            self.lossless = "off"  # which YAML reads as a boolean
        super().__post_init__()


@dataclass(kw_only=True)
class ExportConfig(Section, key="export"):
    """A drafter for other engines: a plain folder, and how each loads and starts it."""

    # Of the plain folder; null: as the drafter is stored. Engines load it in the target's.
    dtype: str | None = setting(None, names=DTYPE_NAMES)
    push_to_hub: str | None = None  # ORG/NAME: the plain folder is also uploaded there


@dataclass(kw_only=True)
class EngineConfig(Section, key="engine"):
    """A server of vLLM, SGLang or llama.cpp that runs with the drafter, and has no other client."""

    url: str | None = None  # as http://127.0.0.1:8000
