"""The names among which settings choose, and what refuses a value by the key that was typed.

A bound stands beside its default, as the metadata of the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

DIVERGENCE_NAMES = ("forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha", "lk_hybrid")
DIVERGENCE_NAMES += ("ce_argmax", "next_token")
MIXTURE = "mixture"  # a weighted sum of divergences
TOKEN_NAMES = ("all", "rejected", "top")
SOURCE_NAMES = ("fixed", "target", "draft", "mix", "block", "replay")
OTHER_NAMES = ("target", "fixed")
GRANULARITY_NAMES = ("sequence", "token")
ENGINE_NAMES = ("decoder", "openai")
VERIFICATION_NAMES = ("speculative", "block", "match")
DRAFTED_NAMES = ("sampled", "argmax", "hybrid", "staged")  # proposers with a drafter
COUNTING_NAMES = ("unigram", "bigram", "ngram")  # proposers that count the training text
PROPOSER_NAMES = (*DRAFTED_NAMES, *COUNTING_NAMES, "prompt_lookup", "none")
PROPOSER_ALIASES = {"draft": "sampled", "lookup": "prompt_lookup"}
COMPILE_NAMES = ("auto", "true", "false")
CODE_NAMES = (*COMPILE_NAMES, "captured")
DOMAIN_NAMES = ("python", "prose", "cpp")
OVERLONG_NAMES = ("cut", "drop")
DATA_NAMES = ("installed", "local", "hub")
SAVED_DTYPE_NAMES = ("float32", "bfloat16")
DTYPE_NAMES = ("auto", *SAVED_DTYPE_NAMES)
DEVICE_NAMES = ("auto", "cpu", "cuda")
SCHEDULE_NAMES = ("cosine", "linear", "constant")
TRACKER_MODES = ("offline", "online", "disabled", "none")
DRAFT_ROLES = ("trained", "given")
BENCHMARK_METHOD_NAMES = ("plain", "speculative", "adaptive", "eager_plain", "eager_speculative")
BENCHMARK_METHOD_NAMES += tuple(name for name in PROPOSER_NAMES if name != "none")
BENCHMARK_METHOD_NAMES += ("hf_plain", "hf_assisted", "hf_lookup", "hf_static")
BENCHMARK_METHODS = ("plain", "speculative", "adaptive", "hf_plain", "hf_assisted", "hf_lookup")
SUBJECT_NAMES = ("decoder", "distill", "gpu")
GPU_PARTS = ("a", "b", "c", "d", "e", "f")
WEIGHT_NAMES = ("pair", "random")
ONLINE_TASKS = ("daemon", "rollback", "drift", "serve_and_refit")
TEACHER_NAMES = ("stored", "target")


def require(condition: bool, key: str, rule: str, value: object) -> None:
    """Raise ValueError `key must rule, got value` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{key} must {rule}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value, or every entry of a list, must keep to; null always does."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    names: Sequence[str] = ()
    filled: bool = False  # a list: at least one entry
    unique: bool = False  # and none twice
    hint: str = ""  # behind the rule, in the message

    def fits(self, value: Any) -> bool:
        """Whether `value` lies within all bounds."""
        return (
            (not self.names or value in self.names)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.names:
            text = f"be one of {', '.join(self.names)}"
        elif isinstance(self.most, int) and self.most > 1:
            text = f"lie in {self.least}..{self.most}"
        elif self.most is not None or self.below is not None:
            left = f"({self.above:g}" if self.least is None else f"[{self.least:g}"
            right = f"{self.below:g})" if self.most is None else f"{self.most:g}]"
            text = f"lie in {left}, {right}"
        else:
            text = "be positive" if self.least is None else f"be at least {self.least:g}"
        return text + self.hint


def setting(default: Any, **rule: Any) -> Any:
    """A field of a section with its `Rule`."""
    metadata = {"rule": Rule(**rule)}
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def positive(default: Any) -> Any:
    """A field that is above 0, or null."""
    return setting(default, above=0)


def check_rules(section: Any, key: str) -> None:
    """Raise ValueError naming the first field of `section`, below `key`, that breaks its rule."""
    for one in fields(section):
        rule, value = one.metadata.get("rule"), getattr(section, one.name)
        if rule is None or value is None:
            continue
        name, entries = f"{key}.{one.name}", value if isinstance(value, list) else [value]
        require(bool(entries) or not rule.filled, name, "name at least one", value)
        once = not rule.unique or len(set(entries)) == len(entries)
        require(once, name, "name none twice", value)
        wrong = [entry for entry in entries if not rule.fits(entry)]
        require(not wrong, name, str(rule), wrong[:1] and wrong[0])
