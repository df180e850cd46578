"""Two processes take the steps of one that accumulates, and agree where they could differ."""

from typing import Any

import pytest
import torch
import torch.distributed

from draftkit.distillation.batch import TokenSequence, collate
from draftkit.distillation.loop import train
from draftkit.distillation.ranks import agree, leave_group
from draftkit.distillation.sources import Source, shuffled
from tests import tiny
from tests.distillation.bigram import CPU, trainer
from tests.launching import fork_ranks

STEPS = 8
# Where gradients are tiny AdamW takes their signs, and the total variation has many such: what
# float32 rounds otherwise is another step. So its sameness is seen in float64.
RUNS = [("forward_kl", "float32", 1e-5), ("next_token", "float32", 1e-5), ("tvd", "float64", 1e-9)]


def texts():
    """Texts of many lengths, so that no two processes have as many tokens."""
    lengths = [5 + (7 * row) % 19 for row in range(40)]
    prompts = tiny.prompts(lengths, seed=3)
    return [TokenSequence(ids, [i >= 2 for i in range(len(ids))]) for ids in prompts]


def trainer_of(architecture="llama", divergence="forward_kl", dtype=torch.float32, **optim):
    """A trainer of one layer."""
    options = {"learning_rate": 1e-2, "warmup_steps": 0, "max_steps": 4, "eval_steps": 2, **optim}
    layers = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    draft = tiny.adapter(architecture, seed=1, dtype=dtype, **layers)
    target = tiny.adapter(seed=2, dtype=dtype, num_hidden_layers=1)
    return trainer(draft, target, divergence, **options)


def sum_of(trainer):
    return float(sum(weight.detach().abs().sum() for _, weight in trainer.trained()))


def batch():
    """The same for all processes."""
    return collate(texts()[:8], device=CPU)


def masks():
    """Which states dropout lets through in two steps, by a trainer and by one of another life."""

    def seen():
        trainer, found = trainer_of("gpt2"), []

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
    trainer = trainer_of()
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
    trainer = trainer_of()
    source = Source(shuffled(texts(), 1), batch_size=4, device=CPU)
    alphas = ({0: 0.5, 2: 0.7, 4: 0.6}, {0: 0.5, 2: 0.6, 4: 0.7})[trainer.accelerator.process_index]
    outcome = train(trainer, source, folder, evaluate=alphas.get, log=lambda *_: None)
    return outcome.best_step, outcome.best_alpha, sum_of(trainer)


def losses(divergence, dtype, *, accumulation):
    """The losses of a run, and the sum of the weights at its end."""
    torch.set_num_threads(1)
    options = {"max_steps": STEPS, "warmup_steps": 10, "per_device_train_batch_size": 4}
    options |= {"gradient_accumulation_steps": accumulation}
    trainer = trainer_of(divergence=divergence, dtype=getattr(torch, dtype), **options)
    ranks = trainer.accelerator
    source = Source(
        shuffled(texts(), 1),
        batch_size=trainer.optim.rows_of_a_process * ranks.num_processes,
        device=CPU,
        rank=ranks.process_index,
        ranks=ranks.num_processes,
    )
    found = [trainer.step(source.batch(step), measure=True) for step in range(STEPS)]
    return {
        "losses": [metrics.loss for metrics in found],
        "alphas": [metrics.alpha for metrics in found],
        "norms": [metrics.grad_norm for metrics in found],
        "tokens": trainer.tokens,
        "weights": sum_of(trainer),
    }


def measured(folder):
    """In a process of several: the losses of each run, and what they could disagree about."""
    found = [losses(name, dtype, accumulation=1) for name, dtype, _ in RUNS]
    agreed: dict = {"agreed": agree(torch.distributed.get_rank())}
    agreed |= {"masks": masks(), "refused": refused(), "best": best(folder)}
    leave_group()
    return [*found, agreed]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of two processes found in each run, and last what they could disagree about."""
    return fork_ranks(measured, tmp_path_factory.mktemp("ranks"))


def test_each_process_and_each_step_has_a_dropout_mask_of_its_own_that_is_repeated(ranks):
    (first, again), (second, _) = (found[-1]["masks"] for found in ranks)
    assert first == again
    assert len({str(mask) for mask in (*first, *second)}) == 4
    assert all(0.8 < sum(mask) / len(mask) < 1 for mask in (*first, *second))


def test_processes_agree_where_they_could_differ(ranks):
    """On a gradient that one of them spoils, the weights that are kept, and any value."""
    first, second = (found[-1] for found in ranks)
    said = "the norm of the gradient became nan at step 0: lower optim.learning_rate"
    assert first["refused"] == second["refused"] == (said, True)
    assert first["best"] == second["best"]
    assert first["best"][:2] == (2, 0.7)
    assert first["agreed"] == second["agreed"] == 0
    assert agree("mine") == "mine"


@pytest.mark.parametrize("place", range(len(RUNS)), ids=[run[0] for run in RUNS])
def test_two_processes_take_the_steps_of_one_that_accumulates(ranks, place):
    divergence, dtype, tolerance = RUNS[place]
    first, second = (found[place] for found in ranks)
    assert first == second
    alone = losses(divergence, dtype, accumulation=2)
    assert first["tokens"] == alone["tokens"]
    for name in ("losses", "alphas", "norms", "weights"):
        assert first[name] == pytest.approx(alone[name], rel=tolerance), name
    assert alone["losses"][-1] < alone["losses"][0]
