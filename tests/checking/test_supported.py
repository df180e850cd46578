"""The lists copied from engines: whole names, and a text that is hashed as llama.cpp hashes it."""

import hashlib

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftkit.checking.supported import ARCHITECTURES, PRE_TOKENIZER_TEXT, PRE_TOKENIZERS


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="it lacks some of the models"
)
def test_every_architecture_is_one_of_transformers() -> None:
    known: set[str] = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known |= {value} if isinstance(value, str) else {*value}
    for engine, names in ARCHITECTURES.items():
        assert len(names) > 15, engine
        assert names <= known, names - known


def test_the_text_that_tells_pre_tokenizers_apart_is_whole() -> None:
    """Its length and digest in conversion/base.py of llama.cpp 0.5.0."""
    assert len(PRE_TOKENIZER_TEXT) == 350
    digest = hashlib.sha256(PRE_TOKENIZER_TEXT.encode()).hexdigest()
    assert digest.startswith("a36179c1e2b1cfcf")
    assert len(PRE_TOKENIZERS) == 95
    assert {len(one) for one in PRE_TOKENIZERS} == {8}
