"""TRL's `DistillationTrainer` as a peer: on-policy distillation, timed step by step.

It takes part as its authors ship it, told only what is compared: batch, lengths, precision,
divergence, learning rate; no checkpoints, no reports, and no gradient checkpointing, which trades
time for memory that nobody lacks here. TRL is no dependency: `pip install draftkit[bench]`.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from draftkit.config import Config
from draftkit.models.loading import Target

LEARNING_RATE = 1e-4  # of both trainers, where none is given
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


@dataclass(frozen=True)
class PeerStep:
    """What a step of the peer took, and on which texts its loss was what."""

    seconds: float
    loss: float
    texts: list[tuple[list[int], list[int]]]  # prompts and completions

    @property
    def tokens(self) -> int:
        return sum(len(completion) for _, completion in self.texts)


class Turns(TrainerCallback):
    """Keeps what every step took, and stops the clock between steps."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.peer: Any = None
        self.done: list[PeerStep] = []
        self._between = between
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Let the other trainer have its turn."""
        seconds = time.perf_counter() - self._started
        self.done.append(PeerStep(seconds, self.peer.latest_loss, self.peer.latest_texts))
        self._between()
        self._started = time.perf_counter()


def peer_class(texts: dict[str, list[int]]) -> Any:
    """TRL's trainer, told token ids for the names of prompts, and asked what it saw.

    Raises ValueError where TRL is not installed.
    """
    try:
        from trl import DistillationTrainer
    except ImportError as error:
        raise ValueError("trl is not installed: pip install 'draftkit[bench]'") from error

    class Peer(DistillationTrainer):
        """Continues the same prompts as the other trainer, to the id."""

        def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
            return [texts[name] for name in prompts], None, {}

        def _generate_single_turn(self, prompt_ids: Any, *others: Any, **options: Any) -> Any:
            completions = super()._generate_single_turn(prompt_ids, *others, **options)
            self.latest_texts = list(zip(prompt_ids, completions, strict=True))
            return completions

        def _compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super()._compute_loss(*args, **options)
            self.latest_loss = float(loss[0].detach())
            return loss

    return Peer


def answer_tokens(config: Config) -> int:
    """How many tokens a step of either trainer samples for a prompt."""
    return config.data.max_length - config.data.prompt_tokens


def trl_steps(
    target: Target,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: Config,
    steps: int,
    between: Callable[[], None],
) -> list[PeerStep]:
    """Train `draft` for `steps` steps.

    `between` is called after every step, and its time counts for nobody. Raises ValueError where
    TRL is not installed.
    """
    named = {str(number): list(prompt) for number, prompt in enumerate(prompts)}
    make, turns = peer_class(named), Turns(between)
    from datasets import Dataset
    from trl import DistillationConfig

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that it passes on under old names
        turns.peer = make(
            model=draft,
            teacher_model=target.adapter.model,
            processing_class=target.tokenizer,
            train_dataset=Dataset.from_dict({"prompt": list(named)}),
            callbacks=[turns],
            args=DistillationConfig(
                output_dir=folder,
                beta=BETAS[config.divergence.name],
                per_device_train_batch_size=config.optim.per_device_train_batch_size,
                max_completion_length=answer_tokens(config),
                max_steps=steps,
                learning_rate=config.optim.learning_rate or LEARNING_RATE,
                bf16=target.adapter.dtype == torch.bfloat16,
                **PLAIN,
            ),
        )
        turns.peer.remove_callback(PrinterCallback)
        turns.peer.train()
    return turns.done
