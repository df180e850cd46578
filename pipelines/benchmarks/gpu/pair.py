"""Part d: a pair trained on the spot, and what distillation gains it in alpha and in wall time.

A deep target of 150 M and a drafter of 15 M learn the text that every installation has; then the
drafter is distilled on texts of the target. Alpha on held-out prompts before and after, and
speculation beside compiled plain decoding, both of this decoder, in turns. How many steps fit into
the time is learned on the way, so another machine trains other weights.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel

from draftkit.config import DataConfig, DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.data.prompts import Example, read_splits
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import Batch, collate, continued, whole_text
from draftkit.distillation.teacher import TargetTeacher
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import estimates, score_contexts
from draftkit.evaluation.judge import Prompts
from draftkit.models.adapter import CausalAdapter
from draftkit.models.devices import resolve_dtype
from draftkit.models.loading import Target, new_llama
from draftkit.workflow.sampling import target_sampler

from ...texts import texts, tokenizer_of
from ..decoder import PLAIN, SPECULATIVE, Pair, measure, setting_of
from ..random_models import TINY, shape
from .part import Part

SETTLING, PACED = 5, 15  # steps before the pace of training is measured, and until it is
WARMUP_STEPS = 20
SPEED_GUESS = 80.0  # seconds
RATES = {"target": 1e-3, "draft": 2e-3, "distilled": 1e-3}
SHARES = {"target": 0.11, "draft": 0.03, "distilled": 0.045}  # of `gpu.seconds`
SAMPLED = SamplingConfig()
REHEARSED_DATA = DataConfig(max_megabytes=0.3, vocab_size=512, prompt_tokens=16, max_length=48)


class Lesson:
    """Text, tokenizer and device of all trainings."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.config = replace(part.config, data=part.size(part.config.data, REHEARSED_DATA))
        self.new_tokens = part.size(128, 6)
        self.device = part.device
        self.dtype = resolve_dtype(self.config.hardware, self.device)
        folder = texts.ensure(self.config)
        self.splits = read_splits(folder)
        self.tokenizer = tokenizer_of(self.config, folder)

    def frozen(self, model: PreTrainedModel) -> CausalAdapter:
        """A copy of `model` for inference."""
        made: Any = copy.deepcopy(model)
        made = made.to(self.dtype).eval().requires_grad_(False)
        return CausalAdapter(made, vocab_size=len(self.tokenizer))

    def fit(
        self, name: str, model: PreTrainedModel, target: CausalAdapter | None, batch: Batch
    ) -> dict[str, float]:
        """Train `model` on rows of `batch` for its share of the time; what that came to."""
        count, whole = self.part.size(64, 4), len(batch.input_ids)
        trainer = Trainer(
            CausalAdapter(model, vocab_size=len(self.tokenizer)),
            None if target is None else TargetTeacher(target),
            optim=OptimConfig(
                learning_rate=RATES[name], warmup_steps=WARMUP_STEPS, weight_decay=0.1
            ),
            divergence=DivergenceConfig(name="next_token" if target is None else "lk_hybrid"),
            sampling=SAMPLED,
            autocast=None if self.dtype == torch.float32 else self.dtype,
        )
        generator = torch.Generator().manual_seed(self.config.seed)

        def drawn(_: int) -> Batch:
            rows = torch.randint(whole, (count,), generator=generator)
            return batch.select(rows.to(self.device))

        seconds = SHARES[name] * self.config.gpu.seconds
        return train(trainer, drawn, seconds, steps=2 if self.part.rehearses else None)

    def rollouts(self, target: CausalAdapter, examples: list[Example]) -> list[Record]:
        """Continuations of prompts by `target`, which end by their length alone."""
        sampler = target_sampler(
            Target(target, self.tokenizer, eos_token_ids=()),
            sampling=SAMPLED,
            seed=self.config.seed,
            max_new_tokens=self.new_tokens,
            batch_size=self.part.size(512, 3),
            max_length=self.config.data.prompt_tokens + self.new_tokens,
        )
        prompts = [example.prompt_ids for example in examples]
        return sampler.sample(prompts, rows=range(len(prompts)), version="")

    def timed(self, target: CausalAdapter, draft: CausalAdapter, temperature: float) -> Any:
        """Points of plain and speculative decoding on held-out prompts."""
        timed = self.splits.test[: self.part.size(12, 2)]
        prompts = Prompts(
            test=[example.prompt_ids for example in timed],
            calibration=[example.prompt_ids for example in self.splits.validation[:4]],
        )
        setting = setting_of(
            prompts,
            sampling=replace(SAMPLED, temperature=temperature),
            max_new_tokens=self.new_tokens,
            gamma=self.part.size(4, 2),
            seed=self.config.seed,
            compiled=self.device.type == "cuda",
        )
        names, turns = (PLAIN, SPECULATIVE), self.part.size(8, 1)
        return {"points": measure(Pair(target, draft), prompts, setting, names, turns=turns)}


def train(
    trainer: Trainer,
    batch: Callable[[int], Batch],
    seconds: float,
    steps: int | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Train for about `seconds`, the rate falling to its end by then; or for `steps`."""
    started = paced = clock()
    loss = 0.0
    for step in count():
        if step == SETTLING:
            paced = clock()
        if step == PACED and steps is None:
            now = clock()
            pace, left = (now - paced) / (PACED - SETTLING), seconds - (now - started)
            most = PACED + max(1, int(left / pace))
            trainer.optim = replace(trainer.optim, max_steps=most)
        if step >= (trainer.optim.max_steps if steps is None else steps):
            break
        loss = trainer.step(batch(step)).loss
    taken = clock() - started
    counts = {"steps": trainer.steps, "tokens": trainer.tokens, "seconds": taken}
    return {**counts, "tokens_per_second": trainer.tokens / taken, "loss": loss}


def run(part: Part) -> None:
    lesson = part.step("text", lambda: Lesson(part), needed=True, kept=False)
    assert lesson is not None
    splits, device = lesson.splits, lesson.device
    models = {
        name: new_llama(
            part.size(shape(layers, 704, 1920, 11, 512), TINY),
            lesson.tokenizer,
            seed=number,
            device=device,
        )
        for number, (name, layers) in enumerate((("target", 24), ("draft", 2)))
    }
    parameters = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    part.step("parameters", lambda: parameters)
    training = collate([whole_text(example) for example in splits.train], device=device)
    for name, model in models.items():
        part.step(
            f"training the {name}",
            lambda name=name, model=model: lesson.fit(name, model, None, training),
            needed=True,
        )
    target = lesson.frozen(models["target"])
    answers = part.step(
        "texts of the target",
        lambda: [
            lesson.rollouts(target, list(examples))
            for examples in (splits.train[: part.size(1024, 6)], splits.test[: part.size(96, 2)])
        ],
        needed=True,
        kept=False,
    )
    assert answers is not None
    rollouts, contexts = answers

    def alpha() -> dict[str, Any]:
        draft = lesson.frozen(models["draft"])
        scored = score_contexts(target, draft, contexts, sampling=SAMPLED, batch_size=32)
        by_mode = estimates(scored)
        return {mode: one.as_dict() for mode, one in by_mode.items()}

    part.step("alpha before", alpha)
    own = [continued(record.prompt_ids, record.output_ids) for record in rollouts]
    batch = collate(own, device=device)
    part.step(
        "distillation",
        lambda: lesson.fit("distilled", models["draft"], target, batch),
        needed=True,
    )
    part.step("alpha after", alpha)
    draft = lesson.frozen(models["draft"])
    for temperature in (0.0, 1.0):
        part.step(
            f"speed at temperature {temperature:g}",
            lambda at=temperature: lesson.timed(target, draft, at),
            kind="speed",
            guess=SPEED_GUESS,
        )
