"""Training texts: what `data` names, split and tokenised once, on disk for all that read it."""

from typing import Any

from draftkit.artifacts import remove
from draftkit.config import Config
from draftkit.data.corpora import store_documents
from draftkit.data.prompts import Splits, make_splits, read_splits
from draftkit.models.loading import load_tokenizer
from pipelines.inputs import models, target_hashes
from pipelines.stage import StageFolder, stage

DOCUMENTS = "documents.arrow"


@stage(sections=("data",), shared=True, inputs=target_hashes)
def texts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Tokenise the text of all splits as the target reads it."""
    documents = store_documents(config.data, folder.path / DOCUMENTS)
    tokenizer = load_tokenizer(models(config)[0], "target")
    splits = make_splits(documents, config.data, tokenizer, folder.path)
    remove(folder.path / DOCUMENTS)
    return {"text_sha256": splits.sha256, **splits.counts}


def splits_of(config: Config) -> Splits:
    """Train, validation and test examples under the target's tokenizer."""
    return read_splits(texts.ensure(config))
