"""Models whose passes take scripted seconds on a clock of the test."""

from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.walltime import decoding, make_decoder
from tests.tabular import TabularAdapter, random_adapter

VOCAB = 8


class Clock:
    """Seconds that pass only where a model says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Slow(TabularAdapter):
    """A float64 table whose passes over N tokens a row take `seconds(N)`."""

    def __init__(self, seed, clock, seconds):
        model = random_adapter(VOCAB, seed)
        super().__init__(model.table, model.memory)
        self.clock = clock
        self.seconds = seconds

    def step(self, tokens, *, positions, cache, last=0):
        self.clock.now += self.seconds(tokens.shape[1])
        return super().step(tokens, positions=positions, cache=cache, last=last)

    def prefill(self, tokens, *, positions, cache):
        self.clock.now += 100
        super().step(tokens, positions=positions, cache=cache)


def plain(target, setting):
    """The way of plain decoding."""
    return decoding(make_decoder(target, None, setting), setting)


def drafted(target, draft, setting):
    """The way of a draft model."""
    decoder = make_decoder(target, DraftModelProposer(draft), setting)
    return decoding(decoder, setting, setting.gamma)
