"""`python -m pipelines.texts`: what `data` names, split and tokenised once, for all that read it.

A target that is given brings its tokenizer; where none is, a byte-level BPE is trained on the
training split, for the target that `target.py` will train.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftkit.artifacts import atomic_path, remove
from draftkit.config import Config
from draftkit.data.corpora import read_documents, training_texts
from draftkit.data.lengths import cut_line, reading_notes, shares_cut
from draftkit.data.prompts import make_splits, read_splits
from draftkit.models.loading import load_tokenizer
from draftkit.models.vocabulary import train_byte_bpe

from .command import main
from .lengths import context_of, lengths_of
from .plan import TEXTS
from .stage import StageFolder

TOKENIZER = "tokenizer"


def texts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Tokenise the text of all splits as the target reads it."""
    data, made = config.data, folder.path / TOKENIZER
    lengths, context = lengths_of(config), context_of(config)
    if config.target.path is None and not made.exists():
        with atomic_path(made) as temporary:
            train_byte_bpe(training_texts(data), data.vocab_size).save_pretrained(temporary)
    tokenizer = tokenizer_of(config, folder.path)
    try:
        splits = make_splits(read_documents(data), data, tokenizer, folder.path, context=context)
    except ValueError:
        remove(made)  # of what is refused nothing stays
        raise
    if splits.counts["rows"]:
        folder.note(cut_line(splits.counts, lengths))
    for line in reading_notes(splits.counts):
        folder.note(line)
    rows = "windows" if splits.counts["windows"] else "rows"
    folder.note(
        f"{len(splits.train)} training {rows} of at most {splits.room.total} tokens; the models' "
        f"context has {context}, the vocabulary {len(tokenizer)}"
    )
    return {
        "vocab_size": len(tokenizer),
        "text_sha256": splits.sha256,
        "lengths": vars(lengths),
        **splits.counts,
        **shares_cut(splits.counts),
    }


def tokenizer_of(config: Config, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that the texts in `folder` are read with."""
    if config.target.path is not None:
        return load_tokenizer(config.target)
    return PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)


def shares_of(folder: Path) -> dict[str, float]:
    """What was cut and dropped of the rows in the complete `folder`, for other summaries."""
    return shares_cut(read_splits(folder).counts)


def training_ids(folder: Path) -> Iterator[list[int]]:
    """Token ids of the training split in the complete `folder`, to be counted by proposers."""
    return (example.token_ids for example in read_splits(folder).train)


if __name__ == "__main__":
    main(TEXTS)
