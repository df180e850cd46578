"""Target and draft mean the same text by the same id, or are refused with the first difference."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

import draftkit
from draftkit.config import (
    NEVER,
    DraftConfig,
    HardwareConfig,
    PretrainConfig,
    SamplingConfig,
    TargetConfig,
)
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.distillation.pretrain import new_model
from draftkit.models.files import KEPT_IDS
from draftkit.models.loading import load_draft, load_target, save_draft, save_model
from draftkit.models.vocabulary import check_same_tokenizer
from tests import tiny
from tests.decoding.checks import Parts, Setting, check_joint_law, measured
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


# Added tokens that differ. The target has <a>, <b> and <c>: ids 258, 259 and 260.

OURS = ("<a>", "<b>", "<c>")
BYTES = [*range(tiny.VOCAB_SIZE)]
ROWS = tiny.VOCAB_SIZE + len(OURS)


def with_tokens(*added: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([*added])
    return tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder = tmp_path_factory.mktemp("pair") / "target"
    save_model(tiny.model(vocab_size=ROWS), with_tokens(*OURS), folder)
    return TargetConfig(path=str(folder))


def drafted(folder: Path, added: tuple[str, ...], rows: int, **shape: bool) -> DraftConfig:
    save_model(tiny.model(seed=1, vocab_size=rows, **shape), with_tokens(*added), folder)
    return DraftConfig(path=str(folder), extra_tokens=NEVER)


@pytest.mark.parametrize(
    ("added", "rows", "proposed"),
    [
        ((), 258, BYTES),
        ((), 300, BYTES),
        (("<a>",), 259, [*BYTES, 258]),
        (("<a>", "<x>", "<c>"), 261, [*BYTES, 258, 260]),
        (("<a>", "<c>", "<b>"), 261, [*BYTES, 258]),
        ((*OURS, "<d>"), 262, None),
    ],
    ids=["lacks", "lacks in padding", "lacks two", "renames", "swaps", "adds"],
)
def test_added_tokens_that_differ_are_never_proposed_and_may_be_read(
    target: TargetConfig, tmp_path: Path, added: tuple[str, ...], rows: int, proposed: list[int]
) -> None:
    draft = drafted(tmp_path, added, rows)
    with pytest.raises(ValueError, match=r"or take this one by draft\.extra_tokens=never") as error:
        draftkit.load_pair(str(target.path), str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)
    sampling = SamplingConfig(temperature=0)
    pair = draftkit.load_pair(str(target.path), draft, dtype="float32", sampling=sampling)
    kept, text = pair.draft.kept_ids, [260, 258, 259, 65]
    assert (None if kept is None else kept.tolist()) == proposed
    assert pair.draft.vocab_size == ROWS
    # A text of ids that the draft never saw is continued as the target would.
    found = draftkit.generate(pair, text, max_new_tokens=6).ids
    row = torch.tensor([text])
    for _ in range(6):
        row = torch.cat([row, tiny.logits(pair.target.adapter.model, row)[:, -1:].argmax(-1)], 1)
    assert found == row[0, len(text) :].tolist()


def test_what_is_saved_of_such_a_draft_has_the_targets_vocabulary(
    target: TargetConfig, tmp_path: Path
) -> None:
    loaded = load_target(target, HardwareConfig(device="cpu"))
    model = drafted(tmp_path / "draft", ("<a>",), 259, tie_word_embeddings=True)
    (tmp_path / "draft" / KEPT_IDS).write_text(json.dumps([3, 9, 258]))
    draft = load_draft(model, loaded)
    save_draft(draft, loaded.tokenizer, tmp_path / "saved")
    again = load_draft(DraftConfig(path=str(tmp_path / "saved")), loaded)
    assert draft.kept_ids is not None
    assert again.kept_ids is not None
    assert again.kept_ids.tolist() == draft.kept_ids.tolist() == [3, 9, 258]
    text = torch.tensor([[260, 65, 259, 66]])
    assert torch.equal(tiny.logits(again.model, text), tiny.logits(draft.model, text))
    assert again.model.get_output_embeddings().weight is again.model.get_input_embeddings().weight


def test_a_draft_whose_other_tokens_differ_is_refused(target: TargetConfig, tmp_path: Path) -> None:
    folder = Path(str(drafted(tmp_path, (), 258).path))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"A": ', '"AA": '))
    draft = DraftConfig(path=str(folder), extra_tokens=NEVER)
    message = r"id \d+ is 'AA?' only in the .*: choose a draft that was trained with .* tokenizer$"
    with pytest.raises(ValueError, match=message):
        load_draft(draft, load_target(target, HardwareConfig(device="cpu")))


def words(*added: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.add_tokens([*added])
    return made


def test_the_joint_law_is_the_targets_where_the_draft_lacks_a_token(tmp_path: Path) -> None:
    save_model(tiny.model(vocab_size=3), words("<new>"), tmp_path / "target")
    save_model(tiny.model(vocab_size=2, dtype=torch.float64), words(), tmp_path / "draft")
    target = load_target(TargetConfig(path=str(tmp_path / "target")), HardwareConfig(device="cpu"))
    model = DraftConfig(path=str(tmp_path / "draft"), extra_tokens=NEVER)
    draft = load_draft(model, target, dtype=torch.float64)
    result = measured(Parts(proposer=lambda _: DraftModelProposer(draft)), Setting(tokens=2))
    assert set(result.cells.outcome.draft_tokens.flatten().tolist()) == {0, 1}
    assert any(2 in text for text in result.cells.outcome.text.tolist())
    check_joint_law(result)
