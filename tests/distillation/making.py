"""Sources of every kind over bigrams, by the settings that name them."""

from functools import cache

from draftkit.config import Config, DecodeConfig, OptimConfig, SamplingConfig, SourceConfig
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.distillation.samplers import DecoderSampler, target_sampler
from draftkit.distillation.sources import TrainingTexts, make_source
from tests import tiny
from tests.distillation.bigram import VOCAB, Bigram

PROMPTS = [[1 + i % (VOCAB - 1), 1 + (3 * i) % (VOCAB - 1)] for i in range(7)]
TEXTS = [Example([*p, 1, 4], [False, False, True, True], "", "") for p in PROMPTS]
BATCH, GAMMA, SEED, LENGTH = 3, 3, 1, 8
ROOM = Room(LENGTH, LENGTH)
TARGET = tiny.target_of(Bigram(1, spread=2.0), None, 0)
SAMPLED = ("draft", "mix", "block", "replay")


class Killed(Exception):
    """The process ended here."""


def sampler_of(model, **changes):
    """`model` as the target, under limits of a few tokens."""
    given = {"name": "target", "sampling": SamplingConfig(), "eos_token_ids": (), "seed": 0}
    given |= {"max_new_tokens": 9, "max_length": 99, "batch_size": 4}
    return DecoderSampler(model=model, **given | changes)


@cache
def rollouts():
    """The target's answers to the prompts."""
    sampler = target_sampler(TARGET, SamplingConfig(), ROOM, seed=5, batch_size=4)
    return sampler.sample(PROMPTS, rows=range(len(PROMPTS)), version="t")


def source_of(name, draft, *, max_steps=12, **options):
    """The source `name` of `draft`; one of a mix has the texts of the data beside it."""
    config = Config(
        seed=SEED,
        source=SourceConfig(name=name, other="fixed", **options),
        optim=OptimConfig(per_device_train_batch_size=BATCH, max_steps=max_steps),
        decode=DecodeConfig(gamma=GAMMA),
    )
    return make_source(config, TARGET, draft, TrainingTexts(TEXTS, ROOM, rollouts()))


def records(source):
    """What was sampled for the block of steps in hand."""
    return [*source.sampled.values()]
