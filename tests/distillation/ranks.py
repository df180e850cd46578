"""A process of several that train together; run as a program by `test_ranks.py`.

Its arguments are divergence and dtype of one run, and of the next; each writes a line.
"""

import json
import sys

import torch
import torch.distributed

from draftkit.config import DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.distillation.batch import TokenSequence
from draftkit.distillation.sources import Shard, TextSource
from draftkit.distillation.teacher import TargetTeacher
from draftkit.distillation.trainer import Trainer
from tests import tiny

ROWS = 4  # of a micro-batch
STEPS = 20


def texts():
    """Texts of many lengths, so that no two processes have as many tokens."""
    lengths = [5 + (7 * row) % 19 for row in range(40)]
    prompts = tiny.prompts(lengths, seed=3)
    return [TokenSequence(ids, [i >= 2 for i in range(len(ids))]) for ids in prompts]


def losses(divergence, dtype, *, accumulation):
    """The losses of a run, and the sum of the weights at its end."""
    torch.set_num_threads(1)
    trainer = Trainer(
        tiny.adapter(seed=1, dtype=dtype),
        TargetTeacher(tiny.adapter(seed=2, dtype=dtype)),
        optim=OptimConfig(
            learning_rate=1e-2,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=accumulation,
        ),
        divergence=DivergenceConfig(name=divergence),
        sampling=SamplingConfig(),
    )
    ranks = trainer.accelerator
    source = TextSource(
        texts(),
        batch_size=trainer.optim.rows_of_a_process * ranks.num_processes,
        seed=1,
        device=torch.device("cpu"),
        shard=Shard(ranks.process_index, ranks.num_processes),
    )
    found = [trainer.step(source.batch(step), measure=True) for step in range(STEPS)]
    weights = float(sum(weight.detach().abs().sum() for _, weight in trainer.trained()))
    return {
        "losses": [metrics.loss for metrics in found],
        "alphas": [metrics.alpha for metrics in found],
        "norms": [metrics.grad_norm for metrics in found],
        "tokens": trainer.tokens,
        "weights": weights,
    }


if __name__ == "__main__":
    for divergence, dtype in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        found = losses(divergence, getattr(torch, dtype), accumulation=1)
        sys.stdout.write(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()
