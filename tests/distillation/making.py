"""Sources of every kind over bigrams, as a pipeline would make them."""

from draftkit.config import SamplingConfig
from draftkit.distillation.batch import TokenSequence, block_of_record
from draftkit.distillation.samplers import AnswerSettings, DecoderSampler, SpeculativeSampler
from draftkit.distillation.sources import Source, cut_texts, shuffled, some_rows
from tests.distillation.bigram import CPU, VOCAB, Bigram

PROMPTS = [[1 + i % (VOCAB - 1), 1 + (3 * i) % (VOCAB - 1)] for i in range(7)]
TEXTS = [TokenSequence([*p, 1, 4], [False, False, True, True]) for p in PROMPTS]
BATCH, GAMMA, SEED, LENGTH = 3, 3, 1, 8


class Killed(Exception):
    """The process ended here."""


def settings(new=LENGTH, sampling=None, batch_size=4):
    return AnswerSettings(
        sampling=sampling or SamplingConfig(),
        eos_token_ids=[0],
        max_new_tokens=new,
        max_length=LENGTH,
        batch_size=batch_size,
        seed=5,
    )


def target():
    return Bigram(1, spread=2.0)


def rollouts():
    """The target's answers to the prompts."""
    sampler = DecoderSampler(model=target(), name="target", settings=settings())
    return sampler.sample(PROMPTS, rows=range(len(PROMPTS)), version="t")


def text_source(draft, **options):
    return Source(shuffled(TEXTS, SEED), batch_size=BATCH, device=CPU)


def draft_source(draft, **options):
    sampler = DecoderSampler(model=draft, name="draft", settings=settings())
    return sampled(shuffled(PROMPTS, SEED), sampler, **options)


def mix_source(draft, *, fraction=0.5, **options):
    sampler = DecoderSampler(model=draft, name="draft", settings=settings())
    chosen = some_rows(shuffled(PROMPTS, SEED), fraction=fraction, seed=SEED)
    return sampled(chosen, sampler, others=shuffled(TEXTS, SEED), **options)


def block_source(draft, **options):
    sampler = DecoderSampler(model=draft, name="draft", settings=settings(new=GAMMA))
    return sampled(cut_texts(rollouts(), SEED), sampler, read=block_of_record, **options)


def replay_source(draft, **options):
    sampler = SpeculativeSampler(
        target=target(),
        draft=draft,
        gamma=GAMMA,
        verification="speculative",
        settings=settings(),
    )
    return sampled(shuffled(PROMPTS, SEED), sampler, **options)


def sampled(prompt_of, sampler, *, others=None, max_steps=12, **options):
    made = {"sampler": sampler, "prompt_of": prompt_of, "max_steps": max_steps}
    return Source(others, batch_size=BATCH, device=CPU, **made, **options)


def records(source):
    """What was sampled for the block of steps in hand."""
    return [*source.sampled.values()]


SAMPLED = {
    "draft": draft_source,
    "mix": mix_source,
    "block": block_source,
    "replay": replay_source,
}
