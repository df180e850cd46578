"""Target and draft mean the same text by the same id, or are refused with the first difference."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from draftkit.config import DraftConfig, HardwareConfig, PretrainConfig, TargetConfig
from draftkit.models.loading import load_draft, load_target, new_model, save_model
from draftkit.models.vocabulary import check_same_tokenizer
from tests.trained import train_byte_bpe

SHAPE = PretrainConfig(num_hidden_layers=1, hidden_size=16)
TEXTS = {"target": "def f(x):\n    return x\n" * 30, "draft": "class Zebra:\n    zoo = 'z'\n" * 30}


def test_a_draft_with_another_vocabulary_is_refused_with_the_first_difference(
    tmp_path: Path,
) -> None:
    for name, text in TEXTS.items():
        tokenizer = train_byte_bpe([text], 300)
        model = new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=torch.device("cpu"))
        save_model(model, tokenizer, tmp_path / name)
    target = load_target(TargetConfig(path=str(tmp_path / "target")), HardwareConfig(device="cpu"))
    check_same_tokenizer(target_tokenizer=target.tokenizer, draft_tokenizer=target.tokenizer)
    message = r"^draft\.path: target and draft have different vocab.* id 258 is '.*' only in the "
    with pytest.raises(ValueError, match=message):
        load_draft(DraftConfig(path=str(tmp_path / "draft")), target)
