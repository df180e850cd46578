"""The sampling that a model's authors advise: what its generation_config.json says of it.

Servers such as vLLM take these keys where a request has none, so a drafter is trained and judged
under them (`sampling.from=model`). Reads one small file, and no weights.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file

from draftkit.artifacts import first_line
from draftkit.config import SamplingConfig, TargetConfig
from draftkit.hub import hub_has
from draftkit.models.loading import check_folder

FILE = "generation_config.json"
KEYS = tuple(one.name for one in fields(SamplingConfig))
# Keys of GenerationConfig under which `generate` gives the same tokens: of sampling and of special
# ids, which are served; of caches, speed and assistants; of what it returns beside the tokens.
SAME_TOKENS = {
    *(*KEYS, "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "low_memory", "use_mtp"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "return_dict_in_generate", "output_attentions", "output_scores"),
    *("output_hidden_states", "output_logits", "renormalize_logits", "remove_invalid_values"),
    "transformers_version",
}
# Values without effect, beside null and what is empty or 0 (of an id, 0 has an effect).
NEUTRAL = dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1)
NEUTRAL |= dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty"), 1)
NEUTRAL |= {"num_return_sequences": 1, "max_length": 20}
OF_SAMPLING = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
OF_BEAMS = {"length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"}


def served_sampling(target: TargetConfig, given: Mapping[str, Any]) -> tuple[SamplingConfig, str]:
    """The sampling of `target`'s file, and a line that says where each part of it comes from.

    What is `given` wins; what neither names has the default of `SamplingConfig`. Raises ValueError
    naming the file, or `target.path`, for what cannot be read.
    """
    content, file = _content(target), f"{target.path}/{FILE}"
    advised: dict[str, Any] = {
        name: _number(content[name], name, file)
        for name in KEYS
        if name not in given and content is not None and content.get(name) is not None
    }
    origin = f"{', '.join(advised)} of {file}" if advised else f"{file} has no other key of it"
    if content is None:
        origin = f"{target.path} has no {FILE}"
    elif content.get("do_sample") is False and "temperature" not in given:
        advised["temperature"] = 0.0
        origin = f"{file} has do_sample: false, which is greedy"
    try:
        sampling = SamplingConfig(**advised | dict(given))
    except ValueError as error:
        raise ValueError(f"{file}: {error}: correct it, or give that key yourself") from error
    parts = ", ".join(f"{name} {getattr(sampling, name):g}" for name in KEYS)
    own = f" ({', '.join(given)} as given)" if given else ""
    if content is not None and sampling.temperature > 0 and "top_k" not in {**advised, **given}:
        origin += "; no top_k there: all ids, where `generate` of transformers would take 50"
    if names := unserved(content or {}):
        origin += f"; not served, though `generate` obeys them: {', '.join(names)}"
    return sampling, f"sampling.from=model: {parts}{own}; {origin}"


def unserved(content: Mapping[str, Any]) -> list[str]:
    """The keys of a generation_config that change what `generate` gives, and that nothing serves.

    Those that transformers does not know, `generate` does not obey either.
    """
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - SAME_TOKENS
    if content.get("do_sample") is False:
        known -= OF_SAMPLING
    if content.get("num_beams") in (None, 1):
        known -= OF_BEAMS
    return sorted(
        name
        for name in known & content.keys()
        if content[name] is not None
        and (content[name] or name.endswith("_token_id"))
        and content[name] != NEUTRAL.get(name)
    )


def _number(value: Any, name: str, file: str) -> Any:
    """The value of `name`, of the type that `SamplingConfig` has for it."""
    kind = type(getattr(SamplingConfig(), name))
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise ValueError(f"{file}: {name} is {value!r}: correct it, or give sampling.{name}=...")
    return kind(value)


def _content(target: TargetConfig) -> dict[str, Any] | None:
    """What the file of `target` holds, None where there is none."""
    if target.path is None:
        return None
    check_folder(target)
    path, name, revision = Path(target.location) / FILE, target.location, target.revision
    local = path.parent.is_dir()
    if not (path.exists() if local else hub_has(name, FILE, section="target", revision=revision)):
        return None
    try:
        path = path if local else Path(str(cached_file(name, FILE, revision=revision)))
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"sampling.from=model: cannot read {FILE} of target.path {target.path} "
            f"({first_line(error)}): mend or fetch it, or use sampling.from=config"
        ) from error
