"""The peers: Hugging Face `generate`, plain, assisted and with prompt lookup, as ways to time.

On the very modules that our decoder runs, so weights and precision are the same. A peer's time
holds all that a caller waits for: tensors from token ids, prefill, rounds, ids back on the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from draftkit.decoding.generation import Completion
from draftkit.engines.folder import assistant_options
from draftkit.evaluation.walltime import Chunk, PromptIds, Setting, Way, now, synchronised_clock
from draftkit.models.adapter import Adapter, parts_of
from draftkit.models.attention import NAME

PAD = 0  # masked in front of a prompt, cut behind an answer: any id will do


def hugging_face(
    target: Adapter,
    setting: Setting,
    *,
    assistant: Adapter | None = None,
    lookup: bool = False,
    static: bool = False,
) -> Way:
    """`generate` of the target's model: plain, with an `assistant`, or with prompt `lookup`.

    Both speculate with `setting.gamma` tokens a round, always. They refuse batches, with a
    ValueError of Hugging Face's. static: with a cache of fixed size, for which it compiles the
    model's steps on CUDA.
    """
    transformers_logging.set_verbosity_error()  # it warns of calls that it makes itself
    model: Any = target.model
    options, models, more = generation_config(setting), [model], {}
    if assistant is not None:
        # Hugging Face reads these from the assistant's own configuration.
        assistant.model.generation_config.update(**assistant_options(setting.gamma))
        more["assistant_model"] = assistant.model
        models.append(assistant.model)
    if lookup:
        options.prompt_lookup_num_tokens = setting.gamma
    if static:
        options.cache_implementation = "static"
    clock = synchronised_clock(target.device)

    def answer(prompts: PromptIds, first: int) -> Chunk:
        torch.manual_seed(setting.seed + first)
        started = clock()
        read = [parts_of(prompt, target.start_id)[0] or prompt for prompt in prompts]
        longest = max(map(len, read))
        tokens = [[PAD] * (longest - len(ids)) + list(ids) for ids in read]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in read]
        with stock_attention(models):
            output = model.generate(
                input_ids=torch.tensor(tokens, device=target.device),
                attention_mask=torch.tensor(mask, device=target.device),
                generation_config=options,
                **more,
            )
        answers = output[:, 1 if target.has_encoder else longest :].tolist()
        chunk = Chunk(0.0, now() - started, [])
        for prompt, tokens in zip(prompts, answers, strict=True):
            # Cut behind the first end of text, as our decoder cuts it.
            ends = (n for n, token in enumerate(tokens, 1) if token in setting.eos_token_ids)
            end = next(ends, None)
            chunk.completions.append(Completion(list(prompt), tokens[:end], ended=end is not None))
        return chunk

    return Way(answer, sizes=[setting.batch_size])


@contextmanager
def stock_attention(models: Sequence[Any]) -> Iterator[None]:
    """Let `models` attend as Hugging Face has it, and not by our faster way."""
    ours = [model for model in models if model.config._attn_implementation == NAME]
    for model in ours:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        for model in ours:
            model.set_attn_implementation(NAME)


def generation_config(setting: Setting) -> GenerationConfig:
    """The sampling of `setting` in Hugging Face's words."""
    sampling = setting.sampling
    drawn = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    return GenerationConfig(
        max_new_tokens=setting.max_new_tokens,
        eos_token_id=list(setting.eos_token_ids) or None,
        pad_token_id=PAD,
        repetition_penalty=sampling.repetition_penalty,
        do_sample=sampling.temperature > 0,
        **(drawn if sampling.temperature > 0 else {}),
    )
