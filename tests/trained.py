"""A tokenizer and a target that have learned a little text, for tests."""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from draftkit.config import PretrainConfig
from draftkit.data.corpora import read_documents
from draftkit.data.splits import SPLITS, make_splits, split_documents
from draftkit.distillation.pretrain import new_model, pretrain, texts_to_learn
from draftkit.models.devices import resolve_device
from draftkit.models.loading import adapter_of
from pipelines.configuration import compose_config

SHAPE = PretrainConfig(num_hidden_layers=2, hidden_size=64, max_steps=20)
CONTEXT = 128
FOLDERS = tempfile.TemporaryDirectory(prefix="targets-")
END_OF_TEXT = "<|endoftext|>"


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocab_size` ids; id 0 ends a text and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


@cache
def trained_target(*settings: str, vocab_size: int = 512, layers: int = 2) -> Path:
    """A target of a few layers and its tokenizer, trained on the text that `settings` name."""
    config = compose_config(["+experiment=smoke", *settings])
    folder = Path(tempfile.mkdtemp(dir=FOLDERS.name))
    documents = [*read_documents(config.data)]
    keys = np.asarray([document.key for document in documents], np.uint64)
    own = [document.split for document in documents]
    training = split_documents(keys, own, config.data) == SPLITS.index("train")
    rows = [document.row for document, learned in zip(documents, training, strict=True) if learned]
    texts = (str(text) for row in rows for text in row.values())
    tokenizer = train_byte_bpe(texts, vocab_size)
    splits = make_splits(iter(documents), config.data, tokenizer, folder, context=CONTEXT)
    device = resolve_device(config.hardware)
    shape = replace(SHAPE, num_hidden_layers=layers)
    made = new_model(shape, tokenizer, LlamaConfig(), seed=config.seed, device=device)
    model = adapter_of(made, vocab_size=len(tokenizer))
    pretrain(
        model,
        texts_to_learn(splits, model),
        folder / "target",
        tokenizer=tokenizer,
        shape=SHAPE,
        config=config,
        log=lambda step, metrics: None,
    )
    return folder / "target"
