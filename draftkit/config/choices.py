"""Names that settings and code share, and what refuses a value by the key that was typed.

Beside the default of a setting stands, as the metadata of its field, a `Rule`: its meaning and its
bounds. `draftkit settings` prints them, and a refusal says them.
"""

from collections.abc import Collection
from copy import copy
from dataclasses import Field, dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, get_args, get_origin
from urllib.parse import urlsplit

DIVERGENCE_NAMES = {
    "forward_kl": "KL(target || draft): covers everything that the target may say",
    "reverse_kl": "KL(draft || target): avoids what the target would not say",
    "jsd": "generalised Jensen-Shannon",
    "tvd": "total variation, which is 1 - alpha; its gradient vanishes at low overlap",
    "neg_log_alpha": "-log alpha, whose gradient does not vanish",
    "lk_hybrid": "KL that turns into TVD as alpha grows",
    "ce_argmax": "cross-entropy to the target's likeliest token: for greedy serving, and for "
    "decode.proposer=argmax",
    "next_token": "plain training on the tokens themselves, the control",
}
MIXTURE = "mixture"
SOURCE_NAMES = {
    "fixed": "the data's own completions",
    "target": "the target's rollouts of the prompts, made once and shared",
    "draft": "samples of the current draft, on its policy",
    "mix": "samples of the current draft, among texts of source.other",
    "block": "what a server sees: decode.gamma tokens of the draft after a piece of a rollout",
    "replay": "texts of speculative decoding, which know where a proposal was refused",
}
VERIFICATION_NAMES = {
    "speculative": "token by token: a proposal x is accepted with min(1, p(x) / q(x))",
    "block": "a whole chain at once, which accepts no fewer",
    "match": "a proposal is accepted where it equals the target's own sample",
    "typical": "lossy: keeps what the target might have said (Medusa); never deployed",
}
*_, TYPICAL = VERIFICATION_NAMES
DRAFTED_NAMES = {  # proposers with a drafter
    "sampled": "the draft, sampled as the target is served",
    "argmax": "the draft's likeliest token",
    "hybrid": "prompt lookup where it has a match, else the draft",
    "staged": "the draft, which decodes speculatively in turn",
}
TREE_NAMES = ("sampled", "argmax")  # those that propose trees too
COUNTING_NAMES = {  # proposers that count the training text
    "unigram": "tokens of the training text, as often as it has them",
    "bigram": "what follows the last token in the training text, as often",
    "ngram": "what followed the last few tokens in the training text",
}
PROPOSER_NAMES = DRAFTED_NAMES | COUNTING_NAMES
PROPOSER_NAMES |= {"prompt_lookup": "copies from the text so far", "none": "nobody: gamma is 0"}
DTYPE_NAMES = ("float32", "bfloat16")
EXTRA_NAMES = {"refuse": "is refused", "never": "is taken, and never proposes them"}
REFUSE, NEVER = EXTRA_NAMES
DIVISOR = "[0.001, inf)"  # of logits, which float32 must hold
TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}
TYPE_NAMES |= {bool: "true or false", NoneType: "null", list: "a list", dict: "a mapping"}
# Of `draft.shrink.layers`, for which Hydra has no type.
TYPE_NAMES |= {Any: "a number or a list of them"}


def require(condition: bool, key: str, rule: str, value: object) -> None:
    """Raise ValueError `key must rule, got value` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{key} must {rule}, got {value!r}")


def check_address(key: str, address: str) -> None:
    """Raise ValueError for an address with a password, which runs and trackers would keep."""
    rule = "hold no user and password: libraries read those from their own files or variables"
    require("@" not in urlsplit(address).netloc, key, rule, "...@...")


@dataclass(frozen=True)
class Rule:
    """What a setting means, and what its value (not null), or every entry of a list, keeps to."""

    says: str
    interval: str = ""  # as "(0, 1]"
    names: Collection[str] = ()  # or each with what it means
    also: float | str | None = None  # what is allowed beside the interval
    filled: bool = False  # a list: at least one entry

    def fits(self, value: Any) -> bool:
        """Whether `value` is one of the names, or lies in the interval."""
        if self.names or not self.interval:
            return not self.names or value in self.names
        if value == self.also or isinstance(value, str):
            return value == self.also
        low, high = map(float, self.interval[1:-1].split(", "))
        ends = "[" * (value == low) + "]" * (value == high)
        return low < value < high or bool(ends and ends in self.interval)

    @property
    def bounds(self) -> str:
        """In words what a value must be; empty where the type alone says it."""
        low = self.interval[1:].removesuffix(", inf)")
        if self.names:
            text = f"one of {', '.join(self.names)}"
        elif self.interval.endswith("inf)"):
            text = "positive" if self.interval[0] == "(" else f"at least {low}"
        else:
            text = f"in {self.interval}" if self.interval else ""
        return text if self.also is None else f"{text}, or {self.also}"


def setting(default: Any, says: str, interval: str = "", **rule: Any) -> Any:
    """A field of a section: its default, what it means, and the rest of its `Rule`."""
    metadata = {"rule": Rule(says, interval, **rule)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(default: str, says: str, **names: str) -> Any:
    """A field that is one of `names`, each of which means what it is given."""
    return setting(default, says, names=names)


def positive(default: Any, says: str) -> Any:
    """A field that is above 0, or null."""
    return setting(default, says, "(0, inf)")


def is_of(value: Any, declared: Any) -> bool:
    """Whether `value` is of the type of a field. A whole number is a number too, True is none."""
    origin, parts = get_origin(declared), get_args(declared)
    if origin is list:
        return isinstance(value, list) and all(is_of(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(one, parts[1]) for one in value.values())
    if parts:  # a union
        return any(is_of(value, one) for one in parts)
    if declared is Any or isinstance(value, bool):
        return declared in (Any, bool)
    return isinstance(value, int | float if declared is float else declared)


def type_name(declared: Any) -> str:
    """`a whole number or null`: what `is_of` asks for."""
    if origin := {list, dict} & {get_origin(declared)}:
        inner = get_args(declared)[-1]
        return TYPE_NAMES[origin.pop()] + ("" if inner is Any else f" of {TYPE_NAMES[inner]}")
    parts = " or ".join(map(type_name, get_args(declared)))
    return parts or TYPE_NAMES.get(declared, f"a {declared.__name__}")


def limits(one: Field[Any]) -> str:
    """What a setting may be, in words: its bounds, or its type."""
    bounds, null = one.metadata["rule"].bounds, NoneType in get_args(one.type)
    return f"{bounds}, or null" if bounds and null else bounds or type_name(one.type)


def check_value(key: str, one: Field[Any], value: Any) -> None:
    """Raise ValueError, naming `key`, unless `value` is of its type and keeps to its rule."""
    rule: Rule | None = one.metadata.get("rule")
    require(is_of(value, one.type), key, f"be {type_name(one.type)}", value)
    if rule is None or value is None:
        return
    entries = value if isinstance(value, list) else [value]
    require(bool(entries) or not rule.filled, key, "name at least one", value)
    for entry in entries:
        if not rule.fits(entry):
            raise ValueError(f"{key} must be {rule.bounds}, got {entry!r} ({rule.says})")


class Section:
    """A part of the configuration, checked where it is made."""

    key: ClassVar[str]  # as the user types it

    def __init_subclass__(cls, key: str) -> None:
        cls.key = key

    def __post_init__(self) -> None:
        section: Any = self  # a dataclass, as all sections are
        for one in fields(section):
            check_value(f"{self.key}.{one.name}".lstrip("."), one, getattr(self, one.name))

    def require(self, condition: bool, name: str, rule: str) -> None:
        """Raise ValueError naming the field `name` unless `condition` holds."""
        require(condition, f"{self.key}.{name}", rule, getattr(self, name))
