"""The longest text of a model, by its configuration."""

import pytest
from transformers import LlamaConfig, MptConfig, PreTrainedConfig, T5Config

from draftkit.models.shapes import SPARE, UNBOUNDED, context_of, rope_types

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CONTEXTS: dict[str, tuple[PreTrainedConfig, int]] = {
    "as declared": (LlamaConfig(max_position_embeddings=128), 128),
    "longrope": (LlamaConfig(max_position_embeddings=128, rope_parameters=LONG), 32),
    "yarn": (LlamaConfig(max_position_embeddings=128, rope_parameters=YARN), 128),
    "biases of slots": (MptConfig(max_seq_len=256), 256 - SPARE),
    "relative": (T5Config(), UNBOUNDED),
}


@pytest.mark.parametrize(("config", "context"), CONTEXTS.values(), ids=CONTEXTS)
def test_texts_end_where_positions_change_their_meaning(
    config: PreTrainedConfig, context: int
) -> None:
    assert context_of(config) == context
    assert rope_types(T5Config()) == []
