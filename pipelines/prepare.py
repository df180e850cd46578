"""`python -m pipelines.prepare`: a tokenizer, a target and a base drafter where none is given.

A byte-level BPE tokenizer is trained on the text, then a small Llama-type target, then a smaller
drafter on the same text, by plain next-token prediction; with `draft.shrink.layers` the drafter is
cut out of the target instead. Shared by every experiment with the same data and shapes; a kill at
any moment costs the steps since the last checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftkit.artifacts import atomic_path, remove
from draftkit.config import Config, DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.data.corpora import Document, split_documents, store_documents
from draftkit.data.prompts import Splits, make_splits
from draftkit.data.store import Mapped
from draftkit.distillation.loop import Progress, train
from draftkit.distillation.sources import TextSource, whole_text
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import (
    end_of_text_ids,
    load_model,
    load_tokenizer,
    new_llama,
    resolve_device,
    resolve_dtype,
    save_model,
    with_path,
)
from draftkit.models.shrink import (
    check_layers,
    check_vocabulary,
    frequent_ids,
    kept_share,
    shrink,
)
from draftkit.models.vocabulary import real_vocab_size, train_byte_bpe
from pipelines.checksums import data_sha256, model_sha256
from pipelines.progress import progress
from pipelines.stage import StageFolder, stage

CPU = torch.device("cpu")
TEXT = "text"  # folder of the text, until the models are there


def inputs(config: Config) -> dict[str, str]:
    """The text, and the target where one is given and only the drafter is to be made."""
    hashes = {"data": data_sha256(config.data)}
    if config.target.path is not None:
        hashes["target"] = model_sha256(config.target, "target")
    elif config.draft.shrink.layers:  # refused before a target is trained for it
        check_layers(config.draft.shrink.layers, config.target.pretrain.num_hidden_layers)
    return hashes


def make_tokenizer(
    config: Config, documents: Sequence[Document], path: Path
) -> PreTrainedTokenizerBase:
    """The given target's tokenizer, or one trained on the training split."""
    if config.target.path is not None:
        return load_tokenizer(config.target, "target")
    if not path.exists():
        training = split_documents(documents, config.data)["train"]
        texts = (str(text) for document in training for text in document.row.values())
        with atomic_path(path) as temporary:
            train_byte_bpe(texts, config.data.vocab_size).save_pretrained(temporary)
    return PreTrainedTokenizerFast.from_pretrained(path)


def pretrain(
    key: str,
    config: Config,
    folder: StageFolder,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
) -> None:
    """Train the model of section `key` from scratch and save it to `<folder>/<key>`."""
    shape = getattr(config, key).pretrain
    device = resolve_device(config.hardware)
    dtype = resolve_dtype(config.hardware, device)
    model = new_llama(shape, tokenizer, seed=config.seed, device=device)
    trainer = Trainer(
        CausalAdapter(model, vocab_size=len(tokenizer)),
        None,
        optim=OptimConfig(
            learning_rate=shape.learning_rate,
            max_steps=shape.max_steps,
            per_device_train_batch_size=shape.per_device_train_batch_size,
            warmup_steps=max(1, shape.max_steps // 20),
            weight_decay=0.1,
            save_steps=config.optim.save_steps,
        ),
        divergence=DivergenceConfig(name="next_token"),
        sampling=SamplingConfig(),
        autocast=dtype if dtype != torch.float32 else None,
    )
    source = TextSource(
        Mapped(whole_text, splits.train),
        batch_size=shape.per_device_train_batch_size,
        seed=config.seed,
        device=device,
    )
    with progress(f"training the {key}", shape.max_steps) as show:

        def log(step: Progress) -> None:
            show(step)
            folder.tracker.log(f"prepare_{key}", step.steps, {"loss": step.metrics.loss})

        training = folder.path / f"{key}-training"
        training.mkdir(exist_ok=True)
        train(trainer, source, training, evaluate=None, log=log)
    save_model(model, tokenizer, folder.path / key)
    remove(training)  # the model is whole: nothing resumes from here


def cut(
    config: Config, folder: StageFolder, tokenizer: PreTrainedTokenizerBase, splits: Splits
) -> None:
    """Make the drafter of layers of the target, as `draft.shrink` says; save it with its ids."""
    options, kept_ids = config.draft.shrink, None
    given = config.target
    source = given if given.path is not None else with_path(given, folder.path / "target")
    target = load_model(source, "target", dtype="auto", device=CPU)
    if options.vocabulary:
        kept_ids = frequent_ids(
            (example.token_ids for example in splits.train),
            count=options.vocabulary,
            always=end_of_text_ids(target.generation_config, tokenizer),
            vocab_size=real_vocab_size(tokenizer, target.config, "target"),
        )
        share = kept_share((example.token_ids for example in splits.validation), kept_ids)
        folder.note(f"the drafter keeps {len(kept_ids)} ids: {share:.1%} of the validation text")
    drafter = shrink(target, options.layers)
    save_model(drafter, tokenizer, folder.path / "draft", kept_ids=kept_ids)


def make(
    key: str,
    config: Config,
    folder: StageFolder,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
) -> None:
    """Make the model of section `key` in `<folder>/<key>`."""
    if key == "draft" and config.draft.shrink.layers:
        cut(config, folder, tokenizer, splits)
    else:
        pretrain(key, config, folder, tokenizer, splits)


@stage(
    sections=("seed", "data", "target.pretrain", "draft.pretrain", "draft.shrink", "target.path"),
    shared=True,
    inputs=inputs,
)
def prepare(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Make what the configuration leaves null."""
    text = folder.path / TEXT
    documents = store_documents(config.data, text / "documents.arrow")
    tokenizer = make_tokenizer(config, documents, folder.path / "tokenizer")
    check_vocabulary(config.draft.shrink.vocabulary, len(tokenizer))
    splits = make_splits(documents, config.data, tokenizer, text)
    folder.note(
        f"{len(splits.train)} training windows of {config.data.max_length} tokens, "
        f"vocabulary {len(tokenizer)}"
    )
    # A drafter is made even where one is given: the folder is the same for both.
    for key in ("target", "draft") if config.target.path is None else ("draft",):
        if not (folder.path / key).exists():
            make(key, config, folder, tokenizer, splits)
    remove(text)
    return {
        "vocab_size": len(tokenizer),
        "text_sha256": splits.sha256,
        "windows": {"train": len(splits.train), **splits.counts},
    }


if __name__ == "__main__":
    prepare.main()
