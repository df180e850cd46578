"""TRL's `DistillationTrainer` as a peer: on-policy distillation, timed step by step.

It takes part as its authors ship it, told only what is compared: batch, lengths, precision,
divergence, learning rate; no checkpoints, no reports, and no gradient checkpointing, which trades
time for memory that nobody lacks here. TRL is no dependency: `pip install draftkit[bench]`.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from draftkit.config import Config
from draftkit.models.loading import Target

BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}  # TRL's interpolation
PLAIN: dict[str, Any] = {  # nothing beside the steps
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "pad_to_multiple_of": None,
    "use_cpu": not torch.cuda.is_available(),
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class Peer(DistillationTrainer):
    """TRL's trainer on prompts of token ids, written as `3 17 9`; keeps its last completions."""

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
        return [[*map(int, prompt.split())] for prompt in prompts], None, {}

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        self.completions = super()._generate_single_turn(*args, **options)
        return self.completions


class Turns(TrainerCallback):
    """Keeps the rate of every step, and stops the clock between steps."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.peer: Any = None
        self.rates: list[float] = []
        self._between = between
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Let the other trainer have its turn."""
        seconds = time.perf_counter() - self._started
        self.rates.append(sum(map(len, self.peer.completions)) / seconds)
        self._between()
        self._started = time.perf_counter()


def trl_rates(
    target: Target,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: Config,
    *,
    steps: int,
    new_tokens: int,
    between: Callable[[], None],
) -> list[float]:
    """Train `draft` for `steps` steps; the completion tokens a second of each.

    `between` is called after every step, and its time counts for nobody.
    """
    turns, optim = Turns(between), config.optim
    assert optim.learning_rate is not None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that it passes on under old names
        turns.peer = Peer(
            model=draft,
            teacher_model=target.adapter.model,
            processing_class=target.tokenizer,
            train_dataset=Dataset.from_dict({"prompt": [" ".join(map(str, p)) for p in prompts]}),
            callbacks=[turns],
            args=DistillationConfig(
                output_dir=folder,
                beta=BETAS[config.divergence.name],
                per_device_train_batch_size=optim.per_device_train_batch_size,
                max_completion_length=new_tokens,
                max_steps=steps,
                learning_rate=optim.learning_rate,
                bf16=target.adapter.dtype == torch.bfloat16,
                **PLAIN,
            ),
        )
        turns.peer.remove_callback(PrinterCallback)
        turns.peer.train()
    return turns.rates
