"""The smallest model that can learn: logits looked up by the last token, in float64."""

import torch
from torch import nn

from draftkit.config import DivergenceConfig, OptimConfig
from draftkit.distillation.batch import TokenSequence, collate
from draftkit.distillation.losses import Objective, TargetTeacher
from draftkit.distillation.trainer import Trainer

VOCAB = 8
CPU = torch.device("cpu")


class Bigram(nn.Module):
    """An adapter whose next-token logits are a row of a table."""

    vocab_size = VOCAB
    max_positions = 64
    width = VOCAB
    device = CPU
    is_constant = False
    dtype = torch.float64
    weight_bytes = 8 * VOCAB * VOCAB
    signature = "bigram"
    has_encoder, start_id = False, None
    parallel, reads, blocks = None, (), 1

    def __init__(self, seed, spread=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = spread * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        self.table = nn.Parameter(table)

    head = None
    kept_ids = None

    def states(self, tokens, keep, packing=None):
        return self.table[tokens[keep]]

    score = states

    def read(self, tokens, keep, layers):
        return self.states(tokens, keep), None

    def forward(self, entries, features=None):
        return self.states(entries.tokens, entries.keep)

    def step(self, tokens, *, positions, cache, last=0):
        return self.table[tokens[:, -last:]]

    def prefill(self, tokens, *, positions, cache):
        """Nothing to remember: the last token says all."""

    def renew(self):
        """Nothing is kept beside the table."""


def trainer(draft=None, target=None, divergence="forward_kl", **optim):
    """A trainer of `draft` towards `target`, both bigrams."""
    options = {"learning_rate": 0.05, "warmup_steps": 0, "max_steps": 12, "logging_steps": 1}
    return Trainer(
        draft or Bigram(0),
        TargetTeacher(target or Bigram(1, spread=2.0)),
        Objective(DivergenceConfig(name=divergence)),
        optim=OptimConfig(**{**options, **optim}),
    )


def batch_of(*rows):
    """Rows of (token ids, number of prompt tokens) as a batch."""
    return collate(
        [TokenSequence(ids, [i >= prompt for i in range(len(ids))]) for ids, prompt in rows],
        device=CPU,
    )
