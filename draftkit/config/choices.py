"""Names that settings and code share, and what refuses a value by the key that was typed.

A bound stands beside its default, as the metadata of the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, get_args, get_origin

DIVERGENCE_NAMES = ("forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha", "lk_hybrid")
DIVERGENCE_NAMES += ("ce_argmax", "next_token")
MIXTURE = "mixture"  # a weighted sum of divergences
SOURCE_NAMES = ("fixed", "target", "draft", "mix", "block", "replay")
TYPICAL = "typical"  # the verification that is lossy
VERIFICATION_NAMES = ("speculative", "block", "match", TYPICAL)
DRAFTED_NAMES = ("sampled", "argmax", "hybrid", "staged")  # proposers with a drafter
TREE_NAMES = ("sampled", "argmax")  # those that propose trees too
COUNTING_NAMES = ("unigram", "bigram", "ngram")  # proposers that count the training text
PROPOSER_NAMES = (*DRAFTED_NAMES, *COUNTING_NAMES, "prompt_lookup", "none")
DTYPE_NAMES = ("float32", "bfloat16")
TRACKER_NAMES = ("offline", "online", "disabled", "none")
DOMAIN_NAMES = ("python", "prose", "cpp")
REFUSE, NEVER = "refuse", "never"  # of `draft.extra_tokens`; the default first
SAMPLING_FROM_NAMES = ("config", "model")  # the default first
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}
KINDS |= {bool: "true or false", NoneType: "null", list: "a list", dict: "a mapping"}


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
    zero: bool = False  # 0 is allowed beside the bounds
    filled: bool = False  # a list: at least one entry
    word: str = ""  # that may stand for a number
    hint: str = ""  # behind the rule, in the message

    def fits(self, value: Any) -> bool:
        """Whether `value` lies within all bounds."""
        if self.word and isinstance(value, str):
            return value == self.word
        return (self.zero and value == 0) or (
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
        text = text.replace("be", "be 0 (greedy) or", 1) if self.zero else text
        return text + (f", or be {self.word}" if self.word else "") + self.hint


def setting(default: Any, **rule: Any) -> Any:
    """A field of a section with its `Rule`."""
    metadata = {"rule": Rule(**rule)}
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def temperature(default: Any, *, greedy: bool = True) -> Any:
    """A field by which logits are divided, which float32 must hold; or 0 where that is greedy."""
    return setting(default, least=1e-3, zero=greedy)


def positive(default: Any) -> Any:
    """A field that is above 0, or null."""
    return setting(default, above=0)


def is_of(value: Any, kind: Any) -> bool:
    """Whether `value` is of the type of a field. A whole number is a number too, True is none."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(is_of(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(one, parts[1]) for one in value.values())
    if parts:  # a union
        return any(is_of(value, one) for one in parts)
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    return isinstance(value, int | float if kind is float else kind)


def kind_name(kind: Any) -> str:
    """`a whole number or null`: what `is_of` asks for."""
    if origin := {list, dict} & {get_origin(kind)}:
        inner = get_args(kind)[-1]
        return KINDS[origin.pop()] + ("" if inner is Any else f" of {KINDS[inner]}")
    return " or ".join(map(kind_name, get_args(kind))) or KINDS.get(kind, f"a {kind.__name__}")


class Section:
    """A part of the configuration, checked where it is made."""

    key: ClassVar[str]  # as the user types it

    def __init_subclass__(cls, key: str) -> None:
        cls.key = key

    def __post_init__(self) -> None:
        section: Any = self  # a dataclass, as all its kinds are
        for one in fields(section):
            rule, value = one.metadata.get("rule"), getattr(self, one.name)
            name = f"{self.key}.{one.name}".lstrip(".")
            require(is_of(value, one.type), name, f"be {kind_name(one.type)}", value)
            if rule is None or value is None:
                continue
            entries = value if isinstance(value, list) else [value]
            require(bool(entries) or not rule.filled, name, "name at least one", value)
            for entry in entries:
                require(rule.fits(entry), name, str(rule), entry)

    def require(self, condition: bool, name: str, rule: str) -> None:
        """Raise ValueError naming the field `name` unless `condition` holds."""
        require(condition, f"{self.key}.{name}", rule, getattr(self, name))
