"""Who samples: the target, by our decoder or an engine that serves it over HTTP, or the draft."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from draftkit.config import Config, SamplingConfig, TargetConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.decoding.generation import Watch
from draftkit.distillation.engines import OpenAISampler
from draftkit.distillation.mixing import MixtureSampler
from draftkit.distillation.samplers import (
    AnswerSettings,
    BlockSampler,
    DecoderSampler,
    Sampler,
    SpeculativeSampler,
)
from draftkit.distillation.teacher import check_top_k
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import Target, load_outline

ROLLOUTS, VALIDATION, TEST = "rollouts", "validation", "test"  # uses of the target's answers


def noise_seed(seed: int, use: str) -> int:
    """The seed of what is sampled for one `use` in a run of `seed`: 63 bits.

    Rows are counted from 0 in every use. Under one seed a prompt that training and test share, or
    two that are nearly alike, would get the same answer in both.
    """
    digest = hashlib.blake2b(f"{use} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def answered(
    sampler: Sampler, examples: Sequence[Example], *, rows: Sequence[int], version: str
) -> list[Record]:
    """What `sampler` says after the prompts of `examples`, with the documents that these are of."""
    prompts = [example.prompt_ids for example in examples]
    records = sampler.sample(prompts, rows=rows, version=version)
    return [
        replace(record, document=example.document, domain=example.domain)
        for record, example in zip(records, examples, strict=True)
    ]


def target_sampler(
    target: Target,
    *,
    sampling: SamplingConfig,
    seed: int,
    max_new_tokens: int,
    batch_size: int,
    max_length: int | None = None,
    top_k: int = 0,
    watch: Watch | None = None,
) -> DecoderSampler:
    """The target, sampled as it is served; `max_length` of prompt and answer: its context."""
    settings = AnswerSettings(
        sampling=sampling,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=max_new_tokens,
        max_length=max_length or target.adapter.max_positions,
        batch_size=batch_size,
        seed=seed,
    )
    check_top_k(top_k, target.adapter.vocab_size)
    return DecoderSampler(
        model=target.adapter, name="target", settings=settings, top_k=top_k, watch=watch
    )


def engine_sampler(target: TargetConfig, config: Config, room: Room) -> OpenAISampler:
    """The target, as the engine at `generate.url` serves it; its weights are not loaded here."""
    options = config.generate
    assert options.url is not None
    assert target.path is not None
    outline = load_outline(target, config.hardware)
    tokenizer = outline.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    settings = AnswerSettings(
        sampling=config.sampling,
        eos_token_ids=outline.eos_token_ids,
        max_new_tokens=room.new,
        max_length=room.total,
        batch_size=options.batch_size,
        seed=noise_seed(config.seed, ROLLOUTS),
    )
    return OpenAISampler(
        url=options.url,
        model=options.model or target.path,
        concurrency=options.batch_size,
        settings=settings,
        encode=partial(tokenizer.encode, add_special_tokens=False),
        decode=decode,
        key=os.environ.get("OPENAI_API_KEY", ""),
    )


def source_sampler(config: Config, target: Target, draft: CausalAdapter, room: Room) -> Sampler:
    """Who samples for a source in which the draft has a part."""
    source = config.source
    rows = config.optim.rows_of_a_process * source.refresh_steps
    settings = AnswerSettings(
        sampling=config.sampling,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=config.proposals if source.name == "block" else room.new,
        max_length=room.total,
        batch_size=min(config.generate.batch_size, rows),
        seed=noise_seed(config.seed, "draft"),
    )
    if source.name == "replay":
        return SpeculativeSampler(
            target=target.adapter,
            draft=draft,
            gamma=config.proposals,
            verification=config.decode.verification,
            settings=settings,
        )
    if source.mixes_tokens:
        return MixtureSampler(
            target=target.adapter, draft=draft, fraction=source.fraction, settings=settings
        )
    if source.name == "block" and draft.parallel is not None:
        settings = replace(settings, max_new_tokens=draft.parallel.blocks)
        return BlockSampler(draft=draft, settings=settings)
    compiled = config.optim.compiles
    return DecoderSampler(model=draft, name="draft", settings=settings, compiled=compiled)
