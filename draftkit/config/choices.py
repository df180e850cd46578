"""The names among which settings choose, and what refuses a value by the key that was typed."""

from collections.abc import Sequence

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
PROPOSER_NAMES = (*DRAFTED_NAMES, "unigram", "bigram", "prompt_lookup", "ngram", "none")
PROPOSER_ALIASES = {"draft": "sampled", "lookup": "prompt_lookup"}
COMPILE_NAMES = ("auto", "true", "false")
CODE_NAMES = (*COMPILE_NAMES, "captured")
DOMAIN_NAMES = ("python", "prose", "cpp")
OVERLONG_NAMES = ("cut", "drop")
DATA_NAMES = ("installed", "local", "hub")
DTYPE_NAMES = ("auto", "float32", "bfloat16")
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


def require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError naming `key` and all choices unless `value` is one of them."""
    require(value in choices, key, f"be one of {', '.join(choices)}", value)


def require_positive(section: object, prefix: str, *names: str) -> None:
    """Raise ValueError naming the first of `names` that is neither positive nor null."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"{prefix}.{name}", "be positive", value)
