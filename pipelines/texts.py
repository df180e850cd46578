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
from draftkit.data.lengths import capped_line, reading_lines, shared_line, shares_cut
from draftkit.data.prompts import make_splits, read_splits
from draftkit.models.loading import load_tokenizer
from draftkit.models.vocabulary import train_byte_bpe

from .command import main
from .lengths import context_of, lengths_of
from .plan import TEXTS
from .stage import StageFolder, is_record

DOCUMENTS = "documents.arrow"
TOKENIZER = "tokenizer"


def make_tokenizer(
    config: Config, documents: Sequence[Document], path: Path
) -> PreTrainedTokenizerBase:
    """The given target's tokenizer, or one trained on the training split and kept in `path`."""
    if config.target.path is not None:
        return load_tokenizer(config.target)
    if not path.exists():
        training = split_documents(documents, config.data)["train"]
        rows = (str(text) for document in training for text in document.row.values())
        with atomic_path(path) as temporary:
            train_byte_bpe(rows, config.data.vocab_size).save_pretrained(temporary)
    return PreTrainedTokenizerFast.from_pretrained(path)


def texts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Tokenise the text of all splits as the target reads it."""
    documents = store_documents(config.data, folder.path / DOCUMENTS)
    lengths, context = lengths_of(config), context_of(config)
    try:
        tokenizer = make_tokenizer(config, documents, folder.path / TOKENIZER)
        splits = make_splits(documents, config.data, tokenizer, folder.path, context=context)
    except ValueError:  # of what is refused nothing stays
        for child in [*folder.path.iterdir()]:
            if not is_record(child.name):
                remove(child)
        raise
    remove(folder.path / DOCUMENTS)
    lowered = capped_line(splits.counts, lengths, config.data, context)
    notes = (lowered, *reading_lines(splits.counts, lengths), shared_line(splits.counts))
    for line in filter(None, notes):
        folder.note(line)
    rows = "windows" if splits.counts["windows"] else "rows"
    folder.note(
        f"{len(splits.train)} training {rows} of at most {splits.room.total} tokens, "
        f"vocabulary {len(tokenizer)}"
    )
    return {
        "vocab_size": len(tokenizer),
        "text_sha256": splits.sha256,
        "lengths": vars(lengths),
        **splits.counts,
        **shares_cut(splits.counts),
    }


def tokenizer_of(config: Config, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that the texts in the complete `folder` were read with."""
    if config.target.path is not None:
        return load_tokenizer(config.target)
    return PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)


def shares_of(folder: Path) -> dict[str, float]:
    """What was cut and dropped of the rows in the complete `folder`, for other summaries."""
    return shares_cut(read_splits(folder).counts)


def training_texts(folder: Path) -> Iterator[list[int]]:
    """Token ids of the training split in the complete `folder`, to be counted by proposers."""
    return (example.token_ids for example in read_splits(folder).train)


if __name__ == "__main__":
    main(TEXTS)
