"""`python -m pipelines.texts`: what `data` names, split and tokenised once, for all that read it.

A target that is given brings its tokenizer; where none is, a byte-level BPE is trained on the
training split, for the target that `target.py` will train.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftkit.artifacts import atomic_path, remove
from draftkit.config import Config
from draftkit.data.corpora import Document, split_documents, store_documents
from draftkit.data.prompts import make_splits, read_splits
from draftkit.models.loading import load_tokenizer
from draftkit.models.vocabulary import train_byte_bpe

from .checksums import given_model, given_text
from .plan import Given, StageFolder
from .run import stage

DOCUMENTS = "documents.arrow"
TOKENIZER = "tokenizer"


def needs(config: Config) -> dict[str, Given]:
    """The text, and the target where one is given: its tokenizer counts."""
    inputs = {"data": given_text(config.data, config.root)}
    if config.target.path is not None:
        inputs["target"] = given_model(config.target, "target", config.root)
    return inputs


def make_tokenizer(
    config: Config, documents: Sequence[Document], path: Path
) -> PreTrainedTokenizerBase:
    """The given target's tokenizer, or one trained on the training split and kept in `path`."""
    if config.target.path is not None:
        return load_tokenizer(config.target, "target")
    if not path.exists():
        training = split_documents(documents, config.data)["train"]
        rows = (str(text) for document in training for text in document.row.values())
        with atomic_path(path) as temporary:
            train_byte_bpe(rows, config.data.vocab_size).save_pretrained(temporary)
    return PreTrainedTokenizerFast.from_pretrained(path)


@stage(sections=("data",), shared=True, needs=needs)
def texts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Tokenise the text of all splits as the target reads it."""
    documents = store_documents(config.data, folder.path / DOCUMENTS)
    tokenizer = make_tokenizer(config, documents, folder.path / TOKENIZER)
    splits = make_splits(documents, config.data, tokenizer, folder.path)
    remove(folder.path / DOCUMENTS)
    folder.note(
        f"{len(splits.train)} training windows of {config.data.max_length} tokens, "
        f"vocabulary {len(tokenizer)}"
    )
    return {"vocab_size": len(tokenizer), "text_sha256": splits.sha256, **splits.counts}


def tokenizer_of(config: Config, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that the texts in the complete `folder` were read with."""
    if config.target.path is not None:
        return load_tokenizer(config.target, "target")
    return PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)


def training_texts(folder: Path) -> Iterator[list[int]]:
    """Token ids of the training split in the complete `folder`, to be counted by proposers."""
    return (example.token_ids for example in read_splits(folder).train)


if __name__ == "__main__":
    texts.main()
