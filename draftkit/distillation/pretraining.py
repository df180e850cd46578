"""Training a small model by plain next-token prediction, on the text of `data`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.artifacts import remove
from draftkit.config import (
    Config,
    DivergenceConfig,
    OptimConfig,
    PretrainConfig,
    SamplingConfig,
    has_compiler,
)
from draftkit.data.prompts import Example
from draftkit.data.store import Mapped
from draftkit.distillation.batch import TokenSequence
from draftkit.distillation.optimizers import OPTIMIZERS
from draftkit.distillation.progress import train_logged
from draftkit.distillation.ranks import alone
from draftkit.distillation.sources import Source, shuffled
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import CausalAdapter
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.loading import new_llama, save_model
from draftkit.tracking import Tracker

WARMUP, DECAY = 20, 0.1  # one step in so many; weight decay
OPTIMIZER_TEXTS = {"adamw": "AdamW", "muon": "Muon, with AdamW for embeddings and vectors,"}
WORTH_COMPILING = 1_000  # steps: the passes of a model compile in half a minute


@alone()  # in a distributed launch the first process makes the model, the others wait for it
def pretrain(
    key: str,
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Example],
    length: int,
    folder: Path,
    tracker: Tracker,
    note: Callable[[str], None],
    start: PreTrainedModel | None = None,
    kept_ids: Tensor | None = None,
) -> None:
    """Train the model of section `key` (`target` or `draft`) on `texts`, `length` tokens a row.

    start: in float32, what training begins with; default: a new model. kept_ids: [K], all that it
    may propose; the rest it does not learn. It is saved to `<folder>/<key>`; what a resumed run
    needs lies beside it until then.
    """
    shape = getattr(config, key).pretrain
    device = resolve_device(config.hardware)
    dtype = resolve_dtype(config.hardware, device)
    model: Any = start or new_llama(shape, tokenizer, seed=config.seed, device=device)
    model = model.to(device)
    compiled = config.optim.compile == "true" or (
        config.optim.compile == "auto" and shape.max_steps >= WORTH_COMPILING and has_compiler()
    )
    if compiled:
        model.base_model.compile(dynamic=False)  # rows are of one length
    trainer = Trainer(
        CausalAdapter(model, vocab_size=len(tokenizer), kept_ids=kept_ids),
        None,
        optim=OptimConfig(
            learning_rate=shape.learning_rate,
            max_steps=shape.max_steps,
            per_device_train_batch_size=shape.per_device_train_batch_size,
            warmup_steps=max(1, shape.max_steps // WARMUP),
            lr_scheduler_type="linear",
            weight_decay=DECAY,
            save_steps=config.optim.save_steps,
            logging_steps=config.optim.logging_steps,
        ),
        divergence=DivergenceConfig(name="next_token"),
        sampling=SamplingConfig(),
        autocast=dtype if dtype != torch.float32 else None,
        compiled=compiled,
        optimizer=OPTIMIZERS[shape.optimizer],
    )
    source = Source(
        shuffled(_rows_to_predict(texts, length, kept_ids), config.seed),
        batch_size=shape.per_device_train_batch_size,
        device=device,
    )
    training = folder / f"{key}-training"
    training.mkdir(exist_ok=True)
    train_logged(
        trainer,
        source,
        training,
        title=f"training the {key}",
        section=f"prepare_{key}",
        tracker=tracker,
        note=note,
    )
    model.to(getattr(torch, shape.dtype))
    save_model(model, tokenizer, folder / key, kept_ids=kept_ids)
    remove(training)  # the model is whole: nothing resumes from here


def recipe(shape: PretrainConfig) -> str:
    """How `pretrain` takes the steps of a model of `shape`, for its card."""
    return (
        f"{OPTIMIZER_TEXTS[shape.optimizer]} at {shape.learning_rate:g}, one step in {WARMUP} to "
        f"warm up, then linearly to 0; weight decay {DECAY:g}"
    )


def full_rows(texts: Sequence[Example], length: int) -> np.ndarray:
    """The token ids of `texts` as rows [N, length], so that nothing is padded.

    A text of that length is a row; shorter ones follow one another, cut where a row ends. What
    fills no row is left out, unless it is all that there is.
    """
    ids = [np.asarray(text.token_ids, np.int32) for text in texts]
    ids.sort(key=lambda text: len(text) < length)
    tokens = np.concatenate(ids)
    width = min(length, len(tokens))
    return tokens[: len(tokens) // width * width].reshape(-1, width)


def _rows_to_predict(
    texts: Sequence[Example], length: int, kept_ids: Tensor | None
) -> Mapped[np.ndarray, TokenSequence]:
    """The `full_rows` with their loss, which kept ids [K] alone carry where there are some."""
    rows = full_rows(texts, length)
    kept = np.full(rows.max() + 1, kept_ids is None)
    if kept_ids is not None:
        kept[kept_ids[kept_ids < len(kept)].numpy()] = True
    return Mapped(partial(_predicted, kept=kept), [*rows])


def _predicted(row: np.ndarray, kept: np.ndarray) -> TokenSequence:
    """A row with the loss on all its tokens but the first, where they are among the `kept`."""
    return TokenSequence(row.tolist(), [False, *kept[row[1:]].tolist()])
