"""Part d: a pair trained on the spot, and what distillation gains it in alpha and in wall time.

A deep target of 150 M and a drafter of 15 M learn the text that every installation has; then the
drafter is distilled on texts of the target. Alpha on held-out prompts before and after, and
speculation beside compiled plain decoding, both of this decoder, in turns. How many steps fit into
the time is learned on the way, so another machine trains other weights.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel

from draftkit.config import (
    DataConfig,
    DivergenceConfig,
    OptimConfig,
    PretrainConfig,
    SamplingConfig,
)
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import Batch, collate, continued, whole_text
from draftkit.distillation.samplers import AnswerSettings, DecoderSampler
from draftkit.distillation.teacher import TargetTeacher, Teacher
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import estimates, score_contexts
from draftkit.evaluation.judge import Prompts
from draftkit.models.adapter import CausalAdapter
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.loading import new_llama
from pipelines.benchmarks.decoder import PLAIN, SPECULATIVE, Pair, measure, setting_of
from pipelines.benchmarks.gpu.part import Part
from pipelines.benchmarks.random_models import shape
from pipelines.texts import texts, tokenizer_of

SETTLING, PACED = 5, 15  # steps before the pace of training is measured, and until it is
WARMUP_STEPS = 20
SPEED_GUESS = 80.0  # seconds


@dataclass(frozen=True)
class Size:
    """Shapes, rows of a step, and shares of `gpu.seconds`; or steps, where time is no matter."""

    target: PretrainConfig
    draft: PretrainConfig
    rows: int
    rollouts: int
    prompts: int
    timed_prompts: int
    new_tokens: int
    gamma: int
    turns: int
    shares: dict[str, float]
    steps: int | None = None


REAL = Size(
    target=shape(24, 704, 1920, 11, 512),
    draft=shape(2, 704, 1920, 11, 512),
    rows=64,
    rollouts=1024,
    prompts=96,
    timed_prompts=12,
    new_tokens=128,
    gamma=4,
    turns=8,
    shares={"target": 0.11, "draft": 0.03, "distilled": 0.045},
)
REHEARSED = Size(
    target=shape(2, 64, 128, 4, 128),
    draft=shape(1, 32, 64, 4, 128),
    rows=4,
    rollouts=6,
    prompts=2,
    timed_prompts=2,
    new_tokens=6,
    gamma=2,
    turns=1,
    shares={"target": 0.0, "draft": 0.0, "distilled": 0.0},
    steps=2,
)
REHEARSED_DATA = DataConfig(max_megabytes=0.3, vocab_size=512, prompt_tokens=16, max_length=48)
RATES = {"target": 1e-3, "draft": 2e-3, "distilled": 1e-3}
SAMPLED = SamplingConfig()


class Lesson:
    """Text, tokenizer and device of all trainings."""

    def __init__(self, part: Part, size: Size) -> None:
        config = part.config
        if part.rehearses:
            config = replace(config, data=REHEARSED_DATA)
        self.part, self.size, self.config = part, size, config
        self.device = resolve_device(config.hardware)
        self.dtype = resolve_dtype(config.hardware, self.device)
        folder = texts.ensure(config)
        self.splits = read_splits(folder)
        self.tokenizer = tokenizer_of(config, folder)

    def adapter(self, model: PreTrainedModel) -> CausalAdapter:
        """`model` behind the face that all see."""
        return CausalAdapter(model, vocab_size=len(self.tokenizer))

    def frozen(self, model: PreTrainedModel) -> CausalAdapter:
        """A copy of `model` for inference."""
        made: Any = copy.deepcopy(model)
        return self.adapter(made.to(self.dtype).eval().requires_grad_(False))

    def fit(
        self, name: str, model: PreTrainedModel, teacher: Teacher | None, batch: Batch
    ) -> dict[str, float]:
        """Train `model` on rows of `batch` for its share of the time; what that came to."""
        seconds = self.size.shares[name] * self.config.gpu.seconds
        trainer = Trainer(
            self.adapter(model),
            teacher,
            optim=OptimConfig(
                learning_rate=RATES[name], warmup_steps=WARMUP_STEPS, weight_decay=0.1
            ),
            divergence=DivergenceConfig(name="next_token" if teacher is None else "lk_hybrid"),
            sampling=SAMPLED,
            autocast=None if self.dtype == torch.float32 else self.dtype,
        )
        generator = torch.Generator().manual_seed(self.config.seed)
        rows, whole = self.size.rows, len(batch.input_ids)

        def drawn(_: int) -> Batch:
            return batch.select(torch.randint(whole, (rows,), generator=generator).to(self.device))

        return train(trainer, drawn, seconds, self.size.steps)

    def rollouts(self, target: CausalAdapter, split: str, wanted: int) -> list[Record]:
        """Continuations by `target` of prompts of a split."""
        examples = getattr(self.splits, split)[:wanted]
        prompts = [example.prompt_ids for example in examples]
        sampler = DecoderSampler(
            model=target,
            name="target",
            settings=AnswerSettings(
                sampling=SAMPLED,
                eos_token_ids=(),
                max_new_tokens=self.size.new_tokens,
                max_length=self.config.data.prompt_tokens + self.size.new_tokens,
                batch_size=max(1, self.size.rollouts // 2),
                seed=self.config.seed,
            ),
        )
        return sampler.sample(prompts, rows=range(len(prompts)), version="")

    def timed(self, target: CausalAdapter, draft: CausalAdapter, temperature: float) -> Any:
        """Points of plain and speculative decoding on held-out prompts."""
        size = self.size
        examples = [e.prompt_ids for e in self.splits.test[: size.timed_prompts]]
        others = [e.prompt_ids for e in self.splits.validation[:4]]
        prompts = Prompts(test=examples, calibration=others)
        setting = setting_of(
            prompts,
            replace(SAMPLED, temperature=temperature),
            max_new_tokens=size.new_tokens,
            gamma=size.gamma,
            seed=self.config.seed,
        )
        setting = replace(setting, compiled=self.device.type == "cuda")
        pair, names = Pair(target, draft, (), 0), (PLAIN, SPECULATIVE)
        return {"points": measure(pair, prompts, setting, names, turns=size.turns)}


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
    tokens = trainer.tokens
    return {
        "steps": trainer.steps,
        "tokens": tokens,
        "seconds": taken,
        "tokens_per_second": tokens / taken,
        "loss": loss,
    }


def run(part: Part) -> None:
    size = REHEARSED if part.rehearses else REAL
    lesson = part.step("text", lambda: Lesson(part, size), needed=True, kept=False)
    assert lesson is not None
    models = {
        name: new_llama(getattr(size, name), lesson.tokenizer, seed=number, device=lesson.device)
        for number, name in enumerate(("target", "draft"))
    }
    parameters = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    part.step("parameters", lambda: parameters)
    texts = collate([whole_text(e) for e in lesson.splits.train], device=lesson.device)
    for name, model in models.items():
        part.step(
            f"training the {name}",
            lambda name=name, model=model: lesson.fit(name, model, None, texts),
            needed=True,
        )
    target = lesson.frozen(models["target"])
    made = part.step(
        "texts of the target",
        lambda: (
            lesson.rollouts(target, "train", size.rollouts),
            lesson.rollouts(target, "test", size.prompts),
        ),
        needed=True,
        kept=False,
    )
    assert made is not None
    rollouts, contexts = made

    def alpha() -> dict[str, Any]:
        draft = lesson.frozen(models["draft"])
        scored = score_contexts(target, draft, contexts, sampling=SAMPLED, batch_size=32)
        found = estimates(scored, seed=0, resamples=1000)
        return {mode: estimate.as_dict() for mode, estimate in found.items()}

    part.step("alpha before", alpha)
    own = [continued(record.prompt_ids, record.output_ids) for record in rollouts]
    batch = collate(own, device=lesson.device)
    part.step(
        "distillation",
        lambda: lesson.fit("distilled", models["draft"], TargetTeacher(target), batch),
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
