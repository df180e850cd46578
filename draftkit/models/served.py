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
from draftkit.models.files import check_folder

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
    file, content, name, revision = f"{target.path}/{FILE}", None, target.location, target.revision
    check_folder(target)
    path = Path(name) / FILE
    local = path.parent.is_dir()
    if path.exists() if local else hub_has(name, FILE, section="target", revision=revision):
        try:
            path = path if local else Path(str(cached_file(name, FILE, revision=revision)))
            content = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"sampling.from=model: cannot read {FILE} of target.path {target.path} "
                f"({first_line(error)}): mend or fetch it, or use sampling.from=config"
            ) from error
    advised: dict[str, Any] = {}
    for key in KEYS:
        value, kind = (content or {}).get(key), type(getattr(SamplingConfig(), key))
        if value is None or key in given:
            continue
        if isinstance(value, bool) or not isinstance(value, int | kind):
            raise ValueError(f"{file}: {key} is {value!r}: correct it, or give sampling.{key}=...")
        advised[key] = kind(value)
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
