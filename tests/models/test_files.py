"""Which files of a folder are the model: what is read, and nothing that is about it."""

import pytest

from draftkit.models.files import TOKENIZER_FILES, is_of_model

READ = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
READ += ["config.json", "config.4.50.0.json", "generation_config.json", "kept_ids.json"]
READ += ["adapter_config.json", "adapter_model.safetensors", "additional_chat_templates"]
READ += ["sentencepiece.bpe.model", "source.spm", "qwen.tiktoken", *TOKENIZER_FILES]
BESIDE = [".cache", ".gitattributes", ".model.safetensors.tmp-1", "README.md", "LICENSE"]
BESIDE += ["notes.txt", "trainer_state.json", "generate.py", "pytorch_model.bin", "original"]


@pytest.mark.parametrize("name", [*READ, *BESIDE])
def test_what_loading_reads_is_of_the_model_and_what_lies_beside_it_is_not(name: str) -> None:
    assert is_of_model(name) == (name in READ)


def test_code_is_of_a_model_whose_code_is_trusted() -> None:
    assert is_of_model("modeling_own.py", code=True)
    assert not is_of_model("modeling_own.py")
