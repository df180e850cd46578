"""What cannot be loaded whole is refused in one line that names the key and the way out."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from draftkit.config import DraftConfig, HardwareConfig, PretrainConfig, TargetConfig
from draftkit.models.loading import (
    end_of_text_ids,
    load_draft,
    load_kept_ids,
    load_model,
    load_outline,
    load_target,
    new_model,
    save_model,
)
from draftkit.models.shrink import write_kept_ids
from tests.trained import train_byte_bpe

SHAPE = PretrainConfig(num_hidden_layers=1, hidden_size=16)
CPU32 = HardwareConfig(device="cpu", dtype="float32")
CPU = torch.device("cpu")
TEXT = ["def add(a, b):\n    return a + b\n" * 30]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_bpe(TEXT, 300)


@pytest.fixture
def folder(tmp_path, tokenizer):
    path = tmp_path / "model"
    save_model(new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU), tokenizer, path)
    return path


def target_of(path):
    return load_target(TargetConfig(path=str(path)), CPU32)


def test_what_was_saved_is_loaded(folder, tokenizer):
    target = target_of(folder)
    fresh = new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU)
    for name, weight in fresh.state_dict().items():
        assert torch.equal(target.adapter.model.state_dict()[name], weight)
    assert target.eos_token_ids == (tokenizer.eos_token_id,)
    assert target.adapter.vocab_size == len(tokenizer)
    assert not target.adapter.model.training


def test_new_models_repeat_for_a_seed_and_differ_between_seeds(tokenizer):
    def weights(seed):
        return (
            new_model(SHAPE, tokenizer, LlamaConfig(), seed=seed, device=CPU)
            .get_input_embeddings()
            .weight
        )

    torch.manual_seed(9)
    before = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.rand(1), before)  # the caller's random state is left alone


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def without_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_more_ids(folder):
    grown = train_byte_bpe(TEXT, 300)
    grown.add_tokens(["<one>", "<two>"])
    grown.save_pretrained(folder)


def damaged(name, damage):
    """A file of the folder with other content; None: without it."""

    def change(folder):
        content = damage((folder / name).read_bytes())
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)

    return change


WEIGHTS = "model.safetensors"
REFUSED = {
    "no folder": (shutil.rmtree, r"^target\.path .*model: no such folder"),
    "no model": (damaged("config.json", lambda _: None), r"target\.path .* holds no config\.json"),
    "no JSON": (damaged("config.json", lambda _: b"{"), r"config\.json. is not a valid JSON"),
    "no weights": (
        damaged(WEIGHTS, lambda _: b"\x10\x00\x00\x00garbage"),
        r"target\.path .* cannot load the model",
    ),
    "half the weights": (
        damaged(WEIGHTS, lambda whole: whole[: len(whole) // 2]),
        r"target\.path .* cannot load the model",
    ),
    "a tensor less": (without_a_tensor, r"1 weights are missing.*model\.norm\.weight"),
    "pickled": (pickled, r"cannot load the model"),
    "fewer rows than ids": (with_more_ids, r"target\.path: the model has \d+ embedding rows"),
}


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_whole_model_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        target_of(folder)


def t5_folder(path, tokenizer, **changes):
    """A tiny T5 with the pad of `tokenizer` to begin with, saved; returns the model too."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    ids = {"vocab_size": 310, "decoder_start_token_id": 0, "eos_token_id": [0, 7]}
    model = T5ForConditionalGeneration(T5Config(**sizes | ids | changes)).eval()
    save_model(model, tokenizer, path)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_an_encoder_decoder_target_is_loaded_with_its_first_and_last_ids(tmp_path, tokenizer, tied):
    model = t5_folder(tmp_path / "t5", tokenizer, tie_word_embeddings=tied)
    if not tied:
        head = torch.randn_like(model.lm_head.weight)
        model.lm_head.weight = torch.nn.Parameter(head)
        save_model(model, tokenizer, tmp_path / "t5")
    target = target_of(tmp_path / "t5")
    assert target.adapter.start_id == 0
    assert target.eos_token_ids == (0, 7)
    assert target.adapter.is_constant
    row = torch.tensor([[5, 6, 7, 0, 5, 6]])
    scores = target.adapter.score(row, torch.arange(6)[None] > 2)
    expected = model(input_ids=row[:, :3], decoder_input_ids=row[:, 3:]).logits[0]
    expected = expected[:, : len(tokenizer)]
    torch.testing.assert_close(scores, expected)


def test_a_decoder_without_a_first_id_is_told_where_to_write_it(tmp_path, tokenizer):
    t5_folder(tmp_path / "t5", tokenizer, decoder_start_token_id=None)
    with pytest.raises(
        ValueError, match=r"t5 has no decoder_start_token_id: add .*generation_config"
    ):
        target_of(tmp_path / "t5")


def test_both_models_are_of_one_kind(folder, tmp_path, tokenizer):
    t5_folder(tmp_path / "t5", tokenizer)
    causal, t5 = (DraftConfig(path=str(path)) for path in (folder, tmp_path / "t5"))
    assert load_draft(t5, target_of(tmp_path / "t5")).model.config.model_type == "t5"
    with pytest.raises(
        ValueError, match=r"^draft\.path: llama is a decoder-only one, and the target"
    ):
        load_draft(causal, target_of(tmp_path / "t5"))
    with pytest.raises(ValueError, match=r"^draft\.path: t5 is an encoder-decoder model, and the "):
        load_draft(t5, target_of(folder))


def test_a_draft_without_a_tokenizer_is_told_how_to_get_one(folder, tmp_path, tokenizer):
    new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU).save_pretrained(
        tmp_path / "bare"
    )
    with pytest.raises(ValueError, match=r"draft\.path .*no usable tokenizer.*save_pretrained"):
        load_draft(DraftConfig(path=str(tmp_path / "bare")), target_of(folder))


@pytest.fixture
def narrow(tmp_path, tokenizer):
    """A draft that keeps three ids."""
    path = tmp_path / "narrow"
    model = new_model(SHAPE, tokenizer, LlamaConfig(), seed=1, device=CPU)
    save_model(model, tokenizer, path, kept_ids=torch.tensor([0, 5, 9]))
    return path


def test_a_draft_proposes_the_ids_that_its_folder_keeps(folder, narrow, tokenizer):
    target = target_of(folder)
    tokens = torch.tensor([[5, 6, 7]])
    scores = load_draft(DraftConfig(path=str(narrow)), target).score(tokens, tokens > 0)
    assert (scores > -torch.inf).nonzero()[:, 1].tolist() == [0, 5, 9] * 3
    assert scores.shape == (3, len(tokenizer))
    assert load_draft(DraftConfig(path=str(folder)), target).kept_ids is None


def test_kept_ids_lie_beside_a_whole_model(narrow, tokenizer):
    loaded = AutoModelForCausalLM.from_pretrained(narrow)
    assert loaded.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert json.loads((narrow / "kept_ids.json").read_text()) == [0, 5, 9]


def test_kept_ids_of_another_vocabulary_are_refused(folder, narrow, tokenizer):
    write_kept_ids(narrow, torch.tensor([1, len(tokenizer)]))
    with pytest.raises(ValueError, match=r"^draft\.path .*kept_ids\.json: .* ids below "):
        load_draft(DraftConfig(path=str(narrow)), target_of(folder))


def test_a_model_of_the_hub_without_kept_ids_keeps_all():
    assert load_kept_ids(DraftConfig(path="someone/some-model"), 10) is None


def test_a_model_can_be_loaded_as_it_is_stored(folder, tmp_path, tokenizer):
    model = new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU)
    save_model(model.to(torch.bfloat16), tokenizer, tmp_path / "half")
    for path, dtype in ((folder, torch.float32), (tmp_path / "half", torch.bfloat16)):
        loaded = load_model(TargetConfig(path=str(path)), dtype="auto", device=CPU)
        assert loaded.dtype == dtype


def test_all_ids_that_end_a_text_are_known(folder, tokenizer):
    stored = json.loads((folder / "generation_config.json").read_text())
    stored["eos_token_id"] = [7, 9]
    (folder / "generation_config.json").write_text(json.dumps(stored))
    assert target_of(folder).eos_token_ids == (tokenizer.eos_token_id, 7, 9)
    generation = target_of(folder).adapter.model.generation_config
    assert end_of_text_ids(generation, tokenizer) == (0, 7, 9)
    assert load_outline(TargetConfig(path=str(folder)), HardwareConfig()).eos_token_ids == (0, 7, 9)


def test_both_models_have_the_dtype_of_the_hardware_or_the_one_given(folder):
    target, draft = TargetConfig(path=str(folder)), DraftConfig(path=str(folder))
    half = load_target(target, HardwareConfig(device="cpu", dtype="bfloat16"))
    assert half.adapter.dtype == half.dtype == load_draft(draft, half).dtype == torch.bfloat16
    learner = load_draft(draft, half, dtype=torch.float32)
    assert (learner.dtype, learner.is_constant) == (torch.float32, False)
    assert load_target(target, CPU32, dtype=torch.bfloat16).adapter.dtype == torch.bfloat16


def test_weights_can_be_read_by_whoever_the_umask_allows(tmp_path, tokenizer):
    model, before = new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU), os.umask(0o022)
    try:
        save_model(model, tokenizer, tmp_path / "model")
        os.umask(0o027)
        save_model(model, tokenizer, tmp_path / "group")
    finally:
        os.umask(before)
    rights = {
        name: {file.stat().st_mode & 0o777 for file in (tmp_path / name).iterdir()}
        for name in ("model", "group")
    }
    assert rights == {"model": {0o644}, "group": {0o640}}
