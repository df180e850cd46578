"""`python -m pipelines.texts`: what `data` names, split and tokenised once, for all that read it.

The target's tokenizer reads it.
"""

from collections import Counter
from typing import Any

from draftkit.config import Config
from draftkit.data.corpora import read_documents
from draftkit.data.lengths import cut_line, reading_notes, shares_cut
from draftkit.data.splits import Splits, make_splits
from draftkit.models.files import ModelFolder

from .command import main
from .plan import TEXTS, lengths_of, shared_context
from .stage import StageFolder

UNLEARNED = ("answers_unused", "answers_weightless")


def texts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Tokenise the text of all splits as the target reads it."""
    target = ModelFolder(config.target)
    data, tokenizer, start = config.data, target.tokenizer, target.start
    lengths, context = lengths_of(config), shared_context(config)
    documents = read_documents(data, target=folder.digests["target"])
    splits = make_splits(documents, data, tokenizer, folder.path, context=context, start=start)
    if splits.counts["rows"]:
        folder.note(cut_line(splits.counts, lengths))
    for line in reading_notes(splits.counts, splits.left_out):
        folder.note(line)
    check_answers(config, splits)
    rows = "windows" if splits.counts["windows"] else "rows"
    folder.note(
        f"{len(splits.train)} training {rows} of at most {splits.room.total} tokens; the models' "
        f"context has {context}, the vocabulary {len(tokenizer)}"
    )
    return {
        "vocab_size": len(tokenizer),
        "text_sha256": splits.sha256,
        "lengths": vars(lengths),
        "left_out": splits.left_out,
        **splits.counts,
        **shares_cut(splits.counts),
    }


def check_answers(config: Config, splits: Splits) -> None:
    """Raise ValueError where the data's own answers are to be learned, and none can be."""
    key, learned = "source", config.source.name
    if learned == "mix":
        key, learned = "source.other", config.source.other
    if learned != "fixed" or any(example.has_completion for example in splits.train):
        return
    unlearned = Counter({name: splits.counts[name] for name in UNLEARNED})
    reason = "; ".join(reading_notes(unlearned)) or "the data hold prompts alone"
    raise ValueError(f"{key}=fixed: there is no answer to learn ({reason}): use target")


if __name__ == "__main__":
    main(TEXTS)
