"""From `source` to the sequences of a training run: who samples, after which prompts, and where
the texts are kept.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftkit.artifacts import fingerprint
from draftkit.config import Config
from draftkit.data.prompts import Example
from draftkit.data.store import Mapped
from draftkit.distillation.batch import TokenSequence
from draftkit.distillation.mixing import MixtureSampler
from draftkit.distillation.refresh import RolloutFiles
from draftkit.distillation.samplers import (
    AnswerSettings,
    DecoderSampler,
    Sampler,
    SpeculativeSampler,
)
from draftkit.distillation.sources import (
    WHOLE,
    Grouping,
    SampledSource,
    Shard,
    Source,
    TextSource,
    block_of_record,
    cut_texts,
    sequence_of_example,
    sequence_of_record,
    shuffled,
    some_rows,
    with_stored_scores,
)
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import Target
from pipelines.generate import generate, read_rollouts
from pipelines.scores import completed, read_scores, scores
from pipelines.texts import splits_of

ROLLOUTS = "rollouts"


def decoding_hash(config: Config) -> dict[str, str]:
    """A checksum of the decoding that a source's texts depend on, where they do."""
    if config.source.name not in ("block", "replay"):
        return {}
    gamma, verification = config.decode.gamma, config.decode.verification
    used = [gamma] if config.source.name == "block" else [gamma, verification]
    return {"decode": fingerprint(used)}


def make_source(
    config: Config,
    target: Target | None,
    draft: CausalAdapter,
    folder: Path,
    shard: Shard = WHOLE,
) -> Source:
    """The sequences that `source` names; what the draft has a part in is kept in `folder`.

    Texts that do not change need no target.
    """
    name, seed = config.source.name, config.seed
    shape: dict[str, Any] = {
        "batch_size": config.optim.rows_of_a_process * shard.count,
        "device": draft.device,
        "shard": shard,
        "packed_length": config.data.max_length if config.data.packing else None,
    }
    if name in ("fixed", "target"):
        version = "target" if name == "target" else ""
        texts = stored_texts(config, name)
        lengths = (len(text.token_ids) for text in texts)
        grouping = grouping_of(config, lengths, shape["batch_size"])
        return TextSource(texts, seed=seed, version=version, grouping=grouping, **shape)
    assert target is not None, name
    if config.hardware.shard_target and (name == "replay" or source_mixes_tokens(config)):
        raise ValueError(
            f"hardware.shard_target: with source={name} the target decodes, which it cannot in "
            "parts: use another source, or hardware.shard_target=false"
        )
    files = RolloutFiles(
        folder=folder / ROLLOUTS,
        refresh_steps=config.source.refresh_steps,
        optim=config.optim,
        suffix="" if shard.count == 1 else f"-{shard.index}",
    )
    sampler = make_sampler(config, target, draft)
    sampled = partial(SampledSource, sampler=sampler, files=files, **shape)
    if name == "block":
        records = read_rollouts(generate.ensure(config))
        return sampled(cut_texts(records, seed), read=block_of_record)
    prompts = Mapped(prompt_of_example, splits_of(config).train)
    grouping = grouping_of(config, map(len, prompts), shape["batch_size"])
    prompt_of = shuffled(prompts, seed, grouping)
    if name == "mix" and config.source.granularity == "sequence":
        texts = stored_texts(config, config.source.other)
        chosen = some_rows(prompt_of, fraction=config.source.fraction, seed=seed)
        return sampled(chosen, text_of=shuffled(texts, seed))
    return sampled(prompt_of)


def grouping_of(config: Config, lengths: Iterable[int], batch_size: int) -> Grouping | None:
    """How texts of like length come together, where they shall."""
    return Grouping(list(lengths), batch_size) if config.optim.group_by_length else None


def prompt_of_example(example: Example) -> list[int]:
    """What a model is to continue."""
    return example.prompt_ids


def stored_texts(config: Config, name: str) -> Sequence[TokenSequence]:
    """The target's rollouts (`target`), or the completions of the data (`fixed`).

    With the target's scores where `generate.top_k` stores some.
    """
    scored = read_scores(scores.ensure(config)) if config.generate.top_k > 0 else None
    if name == "target":
        records = read_rollouts(generate.ensure(config)) if scored is None else scored
        return Mapped(sequence_of_record, records)
    key = "source" if config.source.name == "fixed" else "source.other"
    examples = completed(splits_of(config).train, key)
    if scored is None:
        return Mapped(sequence_of_example, examples)
    assert len(scored) == len(examples)

    def with_scores(row: int) -> TokenSequence:
        return with_stored_scores(sequence_of_example(examples[row]), scored[row])

    return Mapped(with_scores, range(len(examples)))


def source_mixes_tokens(config: Config) -> bool:
    """Whether target and draft take turns inside a text."""
    return config.source.name == "mix" and config.source.granularity == "token"


def make_sampler(config: Config, target: Target, draft: CausalAdapter) -> Sampler:
    """Who samples for a source in which the draft has a part."""
    source, length = config.source, config.data.max_length
    rows = config.optim.rows_of_a_process * source.refresh_steps
    settings = AnswerSettings(
        sampling=config.sampling,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=config.decode.gamma if source.name == "block" else length,
        max_length=length,
        batch_size=min(config.generate.batch_size, rows),
        seed=config.seed,
    )
    if source.name == "replay":
        return SpeculativeSampler(
            target=target.adapter,
            draft=draft,
            gamma=config.decode.gamma,
            verification=config.decode.verification,
            settings=settings,
        )
    if source_mixes_tokens(config):
        return MixtureSampler(
            target=target.adapter, draft=draft, fraction=source.fraction, settings=settings
        )
    compiled = config.optim.compiles
    return DecoderSampler(model=draft, name="draft", settings=settings, compiled=compiled)
