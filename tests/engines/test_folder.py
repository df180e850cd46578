"""A drafter's plain folder: the target's rows, tokenizer and context, and the drafter's logits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from draftkit.config import DraftConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.config.text import LoraConfig
from draftkit.data.rollouts import Record
from draftkit.engines.folder import fit_rows, raise_context, write_folder, write_plain_folder
from draftkit.evaluation.alpha import score_drafts
from draftkit.models.adapter import CausalAdapter
from draftkit.models.files import KEPT_IDS, ModelFolder
from draftkit.models.loading import load_draft, load_target
from draftkit.models.lora import with_lora
from tests.engines import making
from tests.engines.making import REAL
from tests.trained import END_OF_TEXT

ROWS = REAL + 14  # of a padded target
IDS = torch.arange(24)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.fixture
def target(tmp_path: Path) -> TargetConfig:
    """A padded target whose tokenizer files are not as save_pretrained would write them."""
    model = making.model(vocab_size=ROWS, max_position_embeddings=256)
    target = making.saved(model, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages }}")
    with (tmp_path / "target" / "tokenizer.json").open("a") as file:
        file.write("\n")
    return target


def exported(
    model: PreTrainedModel, target: TargetConfig, folder: Path, dtype: str | None = None
) -> tuple[Path, list[str]]:
    draft = making.saved_draft(model, folder / "draft")
    notes = write_plain_folder(draft, target, folder / "hf", gamma=3, dtype=dtype)
    return folder / "hf", notes


@pytest.mark.parametrize(
    ("architecture", "rows", "tied"),
    [
        ("llama", REAL, True),
        ("llama", ROWS + 50, False),
        ("qwen2", ROWS, False),
        ("qwen3", REAL, False),
        ("qwen3", ROWS + 50, True),
    ],
)
def test_logits_of_the_real_vocabulary_stay_and_padding_never_wins(
    tmp_path: Path, target: TargetConfig, architecture: str, rows: int, tied: bool
) -> None:
    model = making.model(architecture, seed=3, vocab_size=rows, tie_word_embeddings=tied)
    folder, _ = exported(model, target, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    before, after = logits(model), logits(loaded)
    assert after.shape[-1] == loaded.config.vocab_size == ROWS
    assert torch.equal(after[..., :REAL], before[..., :REAL])
    assert (after[..., REAL:] < after[..., :REAL].amax(-1, keepdim=True)).all()
    shares = after.softmax(-1)
    assert (shares[..., REAL:] <= shares[..., :REAL].sum(-1, keepdim=True) / REAL).all()
    same = loaded.get_input_embeddings().weight.data_ptr() == loaded.lm_head.weight.data_ptr()
    assert same == tied


def test_an_untied_folder_holds_a_head_of_the_same_logits(
    tmp_path: Path, target: TargetConfig
) -> None:
    draft = making.saved_draft(making.model(tie_word_embeddings=True), tmp_path / "draft")
    for untied in (False, True):
        folder = tmp_path / str(untied)
        write_folder(draft, target, folder, gamma=3, untied=untied)
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == untied
    tied, own = (AutoModelForCausalLM.from_pretrained(tmp_path / one) for one in ("False", "True"))
    assert torch.equal(logits(tied), logits(own))
    assert own.get_input_embeddings().weight.data_ptr() != own.lm_head.weight.data_ptr()


def test_padding_does_not_win_where_all_real_logits_are_negative() -> None:
    model: Any = making.model()
    model.lm_head.weight.data -= 100 * logits_direction(model)
    assert (logits(model)[0, -1] < 0).all()
    fit_rows(model, rows=ROWS, real=REAL)
    assert logits(model)[0, -1].argmax() < REAL


def logits_direction(model: Any) -> torch.Tensor:
    """The last hidden state of the text, of length 1."""
    with torch.inference_mode():
        state = model.model(IDS).last_hidden_state[0, -1]
    return (state / state.norm()).clone()


def test_the_tokenizer_is_the_target_s_byte_for_byte(tmp_path: Path, target: TargetConfig) -> None:
    folder, _ = exported(making.model(), target, tmp_path)
    own = Path(str(target.path))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (own / name).read_bytes()
    extra = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in folder.iterdir()} - extra <= {file.name for file in own.iterdir()}


def test_a_target_without_tokenizer_files_is_refused(tmp_path: Path, target: TargetConfig) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(str(target.path)) / name).unlink()
    with pytest.raises(ValueError, match=r"^target\.path .*tokenizer"):
        exported(making.model(), target, tmp_path)


def test_another_vocabulary_is_refused(tmp_path: Path, target: TargetConfig) -> None:
    path = Path(str(target.path)) / "tokenizer.json"
    path.write_text(path.read_text().replace(END_OF_TEXT, "<|over|>"))
    with pytest.raises(ValueError, match=r"^draft\.path: target and draft have different vocab"):
        exported(making.model(), target, tmp_path)
    draft = DraftConfig(path=str(tmp_path / "draft"), extra_tokens="never")
    notes = write_plain_folder(draft, target, tmp_path / "hf", gamma=1)
    assert any(f"proposes {REAL - 1} ids (" in note for note in notes)
    renamed = ModelFolder(target).tokenizer.convert_tokens_to_ids("<|over|>")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (logits(model).argmax(-1) != renamed).all()


def test_rotary_positions_go_on_to_the_target_s_context(
    tmp_path: Path, target: TargetConfig
) -> None:
    folder, notes = exported(making.model(), target, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(folder).config.max_position_embeddings == 256
    (note,) = (note for note in notes if "context" in note)
    assert note.startswith("context raised from 128 to the target's 256 tokens")


@pytest.mark.parametrize(
    ("architecture", "changes", "context", "reason"),
    [
        ("gpt2", {}, 128, "positions are learnt"),
        ("llama", {"rope_type": "yarn", "factor": 2.0}, 128, "rope scaling yarn"),
        ("llama", {"rope_type": "linear", "factor": 2.0}, 256, "raised"),
        ("gpt_neox", {}, 256, "raised"),
    ],
)
def test_positions_that_end_are_left_and_named(
    architecture: str, changes: dict[str, Any], context: int, reason: str
) -> None:
    rope = {"rope_parameters": {"rope_theta": 1e4, **changes}} if changes else {}
    config = making.model(architecture, **rope).config
    (note,) = raise_context(config, 256)
    assert reason in note
    assert config.max_position_embeddings == context
    assert raise_context(config, 64) == []


def test_an_assistant_of_transformers_finds_its_gamma_and_the_ends(
    tmp_path: Path, target: TargetConfig
) -> None:
    folder, _ = exported(making.model(), target, tmp_path)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] == 3
    assert settings["num_assistant_tokens_schedule"] == "constant"
    assert settings["assistant_confidence_threshold"] == 0
    assert settings["eos_token_id"] == [0]


def test_updates_of_lora_are_merged(tmp_path: Path, target: TargetConfig) -> None:
    model: Any = making.model()
    adapter = CausalAdapter(model, vocab_size=REAL)
    with_lora(adapter, LoraConfig(rank=2), seed=0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    expected = logits(model)
    folder, _ = exported(model, target, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(loaded)[..., :REAL], expected, atol=1e-4)
    assert not any("lora" in name for name in loaded.state_dict())


def test_the_dtype_is_that_of_the_weights_or_the_chosen_one(
    tmp_path: Path, target: TargetConfig
) -> None:
    for dtype, stored in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        folder, _ = exported(making.model(), target, tmp_path, dtype)
        assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == stored


@pytest.mark.parametrize("tied", [True, False])
def test_ids_that_a_drafter_does_not_propose_never_win_in_an_engine(
    tmp_path: Path, target: TargetConfig, tied: bool
) -> None:
    model, kept = making.model(tie_word_embeddings=tied), torch.tensor([3, 8, 9, 40])
    draft = making.saved_draft(model, tmp_path / "draft", kept_ids=kept)
    notes = write_plain_folder(draft, target, tmp_path / "hf", gamma=1)
    assert any("proposes 4 ids (draft.shrink.vocabulary, " in note for note in notes)
    assert not (tmp_path / "hf" / KEPT_IDS).exists()
    before = logits(model)
    after = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    assert torch.equal(after[..., kept], before[..., kept])
    others = [token for token in range(ROWS) if token not in kept]
    mean = before[..., kept].mean(-1, keepdim=True).expand(-1, -1, len(others))
    torch.testing.assert_close(after[..., others], mean)
    assert torch.isin(after.argmax(-1), kept).all()


def test_transformers_accepts_of_the_folder_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an assistant, greedily: the answers are the target's own, in so many passes."""
    own: Any = making.model(num_hidden_layers=2)
    target = making.saved(own, tmp_path / "target")
    folder, _ = exported(making.tiny.related(own), target, tmp_path)
    accepted: list[int] = []
    monkeypatch.setattr(
        AssistedCandidateGenerator,
        "update_candidate_strategy",
        lambda self, input_ids, scores, num_matches: accepted.append(int(num_matches)),
    )
    assistant = AutoModelForCausalLM.from_pretrained(folder)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    records, passes = [], []
    for row, prompt in enumerate(making.tiny.prompts([5, 9, 3, 6])):
        ids = torch.tensor([prompt])
        made = own.generate(ids, assistant_model=assistant, **options)
        assert torch.equal(made, own.generate(ids, **options))
        passes.append(len(accepted) - sum(passes))
        answer = {"prompt_ids": prompt, "output_ids": made[0, len(prompt) :].tolist(), "row": row}
        records.append(Record(**answer, sampler="target", sampler_version="", sampling={}, seed=0))
    assert sum(accepted) > 4
    loaded = load_target(target, HardwareConfig(device="cpu", dtype="float32"))
    draft = load_draft(DraftConfig(path=str(folder)), loaded)
    greedy = SamplingConfig(temperature=0.0)
    drafts = {"draft": draft}
    totals = score_drafts(loaded.adapter, drafts, records, sampling=greedy, batch_size=4)["draft"]
    rounds = replace(totals, cut=torch.zeros(4, dtype=torch.bool)).tokens_a_pass("alpha", 3)
    assert rounds.counts.tolist() == passes
