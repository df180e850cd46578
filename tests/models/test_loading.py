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
    MptConfig,
    OpenAIGPTConfig,
    Phi3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from draftkit.config import DraftConfig, HardwareConfig, PretrainConfig, TargetConfig
from draftkit.distillation.assembly import made_parallel
from draftkit.distillation.pretrain import new_model
from draftkit.models.files import KEPT_IDS, end_of_text_ids
from draftkit.models.loading import (
    load_draft,
    load_kept_ids,
    load_model,
    load_outline,
    load_target,
    save_model,
)
from tests.trained import train_byte_bpe

SHAPE = PretrainConfig(num_hidden_layers=1, hidden_size=16)
CPU32 = HardwareConfig(device="cpu", dtype="float32")
CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
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
        model = new_model(SHAPE, tokenizer, LlamaConfig(), seed=seed, device=CPU)
        return model.get_input_embeddings().weight

    torch.manual_seed(9)
    before = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.rand(1), before)  # the caller's random state is left alone


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def holding(**tensors):
    """More tensors in the file, or others in their place; None: without it."""

    def change(folder):
        held = {**load_file(folder / WEIGHTS), **tensors}
        held = {name: tensor for name, tensor in held.items() if tensor is not None}
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def saying(**keys):
    """Other keys in config.json."""

    def change(folder):
        shape = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**shape, **keys}))

    return change


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


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
    "a tensor less": (
        holding(**{"model.norm.weight": None}),
        r"1 weights are missing.*model\.norm\.weight",
    ),
    "pickled": (pickled, r"^target\.path .* pytorch_model\.bin is pickled.*\.save_pretrained\("),
    "no file of weights": (damaged(WEIGHTS, lambda _: None), r"holds no \*\.safetensors"),
    "no number": (
        holding(**{"model.norm.weight": torch.full((16,), torch.nan)}),
        r"^target\.path .*model: [\d,]+ of [\d,]+ logits .* no finite numbers",
    ),
    "a bias": (
        holding(**{"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}),
        r"^target\.path .*1 weights have no place .*\(first: .*q_proj\.bias\)",
    ),
    "a layer more": (
        holding(**{"model.layers.1.input_layernorm.weight": torch.ones(16)}),
        r"1 weights have no place .*\(first: model\.layers\.1\.input_layernorm",
    ),
    "scales of a precision that config.json does not name": (
        holding(**{"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}),
        r"1 weights have no place .*weight_scale_inv",
    ),
    "quantised, without what reads it": (
        saying(quantization_config=AWQ),
        r"^target\.path .* it is quantised by awq: install what reads that, or give it unquant",
    ),
    "shapes that are none": (saying(hidden_size="wide"), r"^target\.path .* cannot load the model"),
    "no heads": (saying(num_attention_heads=0), r"^target\.path .* cannot load the model"),
    "a model of pictures": (
        saying(model_type="vit"),
        r"^target\.path .* transformers has no AutoModelForCausalLM of the type vit",
    ),
    "a model of pictures and text": (
        saying(model_type="qwen2_5_vl"),
        r"^target\.path .* transformers has no AutoModelForCausalLM of the type qwen2_5_vl",
    ),
    "fewer rows than ids": (with_more_ids, r"target\.path: the model has \d+ embedding rows"),
}


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_whole_model_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as refused:
        target_of(folder)
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)


BESIDE_TEXT = (
    *("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    *("mtp.layers.0.mlp.up_proj.weight", "model.mtp_block.0.weight"),
    *("model.layers.1.eh_proj.weight", "model.layers.0.self_attn.k_scale"),
    *("model.visual.patch_embed.weight", "vision_tower.blocks.0.weight", "audio_tower.conv.weight"),
    "multi_modal_projector.linear.weight",
)


def test_weights_that_no_text_passes_through_may_be_left_out(folder):
    holding(**{name: torch.ones(2) for name in BESIDE_TEXT})(folder)
    saying(num_nextn_predict_layers=1)(folder)
    assert target_of(folder).adapter.vocab_size
    saying(num_nextn_predict_layers=0)(folder)
    with pytest.raises(ValueError, match=r"\(first: model\.layers\.1\.eh_proj\.weight\)"):
        target_of(folder)


OF_TYPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 310}
OF_TYPE |= {"num_attention_heads": 2, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 9.0]}
LONG |= {"rope_theta": 10000.0}


def saved(path, config, tokenizer):
    """A random model of `config`, with wide weights, in a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    save_model(model, tokenizer, path)
    return path


def test_longrope_is_served_by_its_short_factors_up_to_its_original_context(tmp_path, tokenizer):
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    config = Phi3Config(**OF_TYPE | lengths, rope_parameters=LONG)
    target = target_of(saved(tmp_path / "phi3", config, tokenizer)).adapter
    assert target.max_positions == 32
    rows = torch.randint(300, (2, target.max_positions))
    keep = torch.zeros_like(rows, dtype=torch.bool)
    keep[0, :9] = True
    beside = target.score(rows, keep)
    torch.testing.assert_close(beside, target.score(rows[:1, :9], keep[:1, :9]))


def test_a_model_that_takes_no_cache_is_refused(tmp_path, tokenizer):
    config = OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=310)
    folder = saved(tmp_path / "gpt", config, tokenizer)
    with pytest.raises(ValueError, match=r"^target\.path .*gpt cannot .* in pieces over a cache"):
        target_of(folder)


def test_a_drafter_whose_rows_cannot_be_packed_proposes_token_by_token(tmp_path, tokenizer):
    shape = {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 128, "vocab_size": 310}
    folder = saved(tmp_path / "mpt", MptConfig(**shape), tokenizer)
    target, draft = target_of(folder), DraftConfig(path=str(folder))
    assert target.adapter.max_positions == 64
    learner = load_draft(draft, target)  # a plain one is right
    with pytest.raises(ValueError, match=r"^draft\.kind=pard: mpt counts .*use draft\.kind=plain"):
        made_parallel(learner, 4, tokenizer, [])
    saying(pard_token=309, pard_k=4)(folder)
    with pytest.raises(ValueError, match=r"^draft\.path .*mpt counts .*use draft\.kind=plain"):
        load_draft(draft, target)


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
    model = new_model(SHAPE, tokenizer, LlamaConfig(), seed=0, device=CPU)
    model.save_pretrained(tmp_path / "bare")
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
    (narrow / KEPT_IDS).write_text(json.dumps([1, len(tokenizer)]))
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
