"""What each of several processes does that train together, for `test_ranks.py`."""

import torch
import torch.distributed

from draftkit.config import DivergenceConfig, OptimConfig
from draftkit.distillation.batch import TokenSequence, collate
from draftkit.distillation.loop import train
from draftkit.distillation.losses import Objective, TargetTeacher
from draftkit.distillation.ranks import agree, leave_group
from draftkit.distillation.sources import Source, shuffled
from draftkit.distillation.trainer import Trainer
from tests import tiny

ROWS = 4  # of a micro-batch
STEPS = 20


def texts():
    """Texts of many lengths, so that no two processes have as many tokens."""
    lengths = [5 + (7 * row) % 19 for row in range(40)]
    prompts = tiny.prompts(lengths, seed=3)
    return [TokenSequence(ids, [i >= 2 for i in range(len(ids))]) for ids in prompts]


def small(architecture="llama", **optim):
    """A trainer of one layer."""
    options = {"learning_rate": 1e-2, "warmup_steps": 0, "max_steps": 4, "eval_steps": 2, **optim}
    layers = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    return Trainer(
        tiny.adapter(architecture, seed=1, **layers),
        TargetTeacher(tiny.adapter(seed=2, num_hidden_layers=1)),
        Objective(DivergenceConfig()),
        optim=OptimConfig(**options),
    )


def batch():
    """The same for all processes."""
    return collate(texts()[:8], device=torch.device("cpu"))


def masks():
    """Which states dropout lets through in two steps, by a trainer and by one of another life."""

    def seen():
        trainer, found = small("gpt2"), []

        def note(module, given, output):
            if module.training:
                found.append((output != 0).flatten().tolist())

        trainer.draft.model.transformer.drop.register_forward_hook(note)
        for _ in range(2):
            trainer.step(batch())
        return found

    return seen(), seen()


def refused():
    """What is said where the gradient of the second process is no number; whether weights stay."""
    trainer = small()
    before = [weight.detach().clone() for _, weight in trainer.trained()]
    if trainer.accelerator.process_index == 1:
        _, weight = trainer.trained()[0]
        weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    said = ""
    try:
        trainer.step(batch())
    except ValueError as error:
        said = str(error)
    after = [weight for _, weight in trainer.trained()]
    return said, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def best(folder):
    """The step whose weights are kept where processes measure another alpha, and the weights."""
    trainer = small()
    source = Source(shuffled(texts(), 1), batch_size=4, device=torch.device("cpu"))
    alphas = ({0: 0.5, 2: 0.7, 4: 0.6}, {0: 0.5, 2: 0.6, 4: 0.7})[trainer.accelerator.process_index]
    try:
        outcome = train(trainer, source, folder, evaluate=alphas.get, log=lambda *_: None)
    except OSError as error:
        return type(error).__name__
    weights = float(sum(weight.detach().abs().sum() for _, weight in trainer.trained()))
    return outcome.best_step, outcome.best_alpha, weights


def losses(divergence, dtype, *, accumulation):
    """The losses of a run, and the sum of the weights at its end."""
    torch.set_num_threads(1)
    trainer = Trainer(
        tiny.adapter(seed=1, dtype=dtype),
        TargetTeacher(tiny.adapter(seed=2, dtype=dtype)),
        Objective(DivergenceConfig(name=divergence)),
        optim=OptimConfig(
            learning_rate=1e-2,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=accumulation,
        ),
    )
    ranks = trainer.accelerator
    source = Source(
        shuffled(texts(), 1),
        batch_size=trainer.optim.rows_of_a_process * ranks.num_processes,
        device=torch.device("cpu"),
        rank=ranks.process_index,
        ranks=ranks.num_processes,
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


def measured(folder, runs):
    """In a process of several: the losses of each run, and what they could disagree about."""
    found = [losses(name, getattr(torch, dtype), accumulation=1) for name, dtype, _ in runs]
    agreed: dict = {"agreed": agree(torch.distributed.get_rank())}
    agreed |= {"masks": masks(), "refused": refused(), "best": best(folder)}
    leave_group()
    return [*found, agreed]
