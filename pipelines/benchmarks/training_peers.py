"""TRL's `DistillationTrainer` as a way to time: on-policy distillation, a step for each batch.

It takes part as its authors ship it, told only what is compared: batch, lengths, precision,
divergence, learning rate; no reports, and no gradient checkpointing, which trades time for memory
that nobody lacks here. A step is its `training_step`, which samples, scores and differentiates, its
clipping and its optimizer; the loop around them, which logs and saves, is the timer's. TRL is no
dependency: `pip install draftkit[bench]`.
"""

import tempfile
import warnings
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import DistillationConfig, DistillationTrainer

from draftkit.config import Config
from draftkit.decoding.generation import Completion
from draftkit.evaluation.walltime import Chunk, PromptIds, Way, synchronised_clock
from draftkit.models.loading import Target

BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}  # TRL's interpolation


class Peer(DistillationTrainer):
    """TRL's trainer on prompts of token ids, written as `3 17 9`; keeps its last completions."""

    completions: list[list[int]]

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
        return [[*map(int, prompt.split())] for prompt in prompts], None, {}

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        self.completions = super()._generate_single_turn(*args, **options)
        return self.completions


def trl_step(target: Target, draft: PreTrainedModel, config: Config, *, new_tokens: int) -> Way:
    """A step of TRL's on the prompts of a batch, for each of which it samples `new_tokens`."""
    optim = config.optim
    assert optim.learning_rate is not None
    unread = Dataset.from_dict({"prompt": ["0"]})  # it wants a data set; prompts are handed in
    # TRL passes settings on under old names, and reads attributes by theirs.
    quietly = partial(warnings.catch_warnings, action="ignore")
    with tempfile.TemporaryDirectory() as folder, quietly():
        peer = Peer(
            model=draft,
            teacher_model=target.adapter.model,
            processing_class=target.tokenizer,
            train_dataset=unread,
            args=DistillationConfig(
                output_dir=folder,
                beta=BETAS[config.divergence.name],
                per_device_train_batch_size=optim.per_device_train_batch_size,
                max_completion_length=new_tokens,
                learning_rate=optim.learning_rate,
                bf16=target.adapter.dtype == torch.bfloat16,
                gradient_checkpointing=False,
                pad_to_multiple_of=None,
                use_cpu=not torch.cuda.is_available(),
                report_to="none",
            ),
        )
    peer.current_gradient_accumulation_steps = 1  # which its loop would set
    model, optimizer = peer.accelerator.prepare(peer.model, peer.create_optimizer())
    clock = synchronised_clock(target.adapter.device)

    def step(prompts: PromptIds, first: int) -> Chunk:
        started = clock()
        with quietly():
            rows = [{"prompt": " ".join(map(str, ids))} for ids in prompts]
            peer.training_step(model, rows, None)
        peer.accelerator.clip_grad_norm_(model.parameters(), peer.args.max_grad_norm)
        optimizer.step()
        model.zero_grad()
        made = [Completion([*p], ids) for p, ids in zip(prompts, peer.completions, strict=True)]
        return Chunk(0.0, clock() - started, made)

    return Way(step)
