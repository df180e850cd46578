"""From `source` to the sequences of a training run: who samples, after which prompts, and where
the texts are kept.
"""

from functools import partial
from typing import Any

from draftkit.artifacts import fingerprint
from draftkit.config import Config
from draftkit.data.prompts import Example
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
    SampledSource,
    Source,
    TextSource,
    block_of_record,
    cut_texts,
    sequence_of_example,
    sequence_of_record,
    shuffled,
    some_rows,
)
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import Target
from pipelines.generate import generate, read_rollouts
from pipelines.inputs import splits_of
from pipelines.stage import StageFolder

ROLLOUTS = "rollouts"


def decoding_hash(config: Config) -> dict[str, str]:
    """A checksum of the decoding that a source's texts depend on, where they do.

    Raises ValueError where there would be nothing to decode.
    """
    if config.source.name not in ("block", "replay"):
        return {}
    gamma, verification = config.decode.gamma, config.decode.verification
    if gamma == 0:
        raise ValueError(
            f"decode.gamma must be at least 1 when source={config.source.name}, which learns on"
            " drafted tokens, got 0"
        )
    used = [gamma] if config.source.name == "block" else [gamma, verification]
    return {"decode": fingerprint(used)}


def make_source(
    config: Config, target: Target, draft: CausalAdapter, folder: StageFolder
) -> Source:
    """The sequences that `source` names; what the draft has a part in is kept in `folder`."""
    name, seed = config.source.name, config.seed
    shape: dict[str, Any] = {
        "batch_size": config.optim.per_device_train_batch_size,
        "device": draft.device,
        "packed_length": config.data.max_length if config.data.packing else None,
    }
    if name in ("fixed", "target"):
        version = "target" if name == "target" else ""
        texts = stored_texts(config, name)
        return TextSource(texts, seed=seed, version=version, **shape)
    files = RolloutFiles(
        folder=folder.path / ROLLOUTS,
        refresh_steps=config.source.refresh_steps,
        optim=config.optim,
        writes=folder.is_main,
    )
    sampler = make_sampler(config, target, draft)
    sampled = partial(SampledSource, sampler=sampler, files=files, **shape)
    if name == "block":
        records = read_rollouts(generate.ensure(config))
        return sampled(cut_texts(records, seed), read=block_of_record)
    prompt_of = shuffled([example.prompt_ids for example in splits_of(config).train], seed)
    if name == "mix" and config.source.granularity == "sequence":
        texts = stored_texts(config, config.source.other)
        chosen = some_rows(prompt_of, fraction=config.source.fraction, seed=seed)
        return sampled(chosen, text_of=shuffled(texts, seed))
    return sampled(prompt_of)


def stored_texts(config: Config, name: str) -> list[TokenSequence]:
    """The target's rollouts (`target`), or the completions of the data (`fixed`)."""
    if name == "target":
        return [sequence_of_record(r) for r in read_rollouts(generate.ensure(config))]
    examples: list[Example] = splits_of(config).train
    texts = [sequence_of_example(e) for e in examples if e.has_completion]
    if not texts:
        key = "source" if config.source.name == "fixed" else "source.other"
        raise ValueError(f"{key}=fixed: the data hold prompts only; use target")
    return texts


def make_sampler(config: Config, target: Target, draft: CausalAdapter) -> Sampler:
    """Who samples for a source in which the draft has a part."""
    source, length = config.source, config.data.max_length
    rows = config.optim.per_device_train_batch_size * source.refresh_steps
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
    if source.name == "mix" and source.granularity == "token":
        return MixtureSampler(
            target=target.adapter, draft=draft, fraction=source.fraction, settings=settings
        )
    compiled = config.optim.compiles
    return DecoderSampler(model=draft, name="draft", settings=settings, compiled=compiled)
