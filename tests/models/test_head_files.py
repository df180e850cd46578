"""draftkit's heads propose what the formulas of the format say, written apart from them.

Folders of other trainers are taken where all engines read them alike, and refused in one line
where they do not, or are of another target.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftkit.config import DraftConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import drafting
from draftkit.evaluation.alpha import score_drafts
from draftkit.models.files import ModelFolder
from draftkit.models.head_files import load_head
from draftkit.models.heads import EAGLE3, adapted, head_config, new_head
from draftkit.models.loading import Target, load_draft, load_target, save_draft
from tests import tiny
from tests.engines.counts import accepted_by_pass
from tests.engines.heads import Head, features_of, fitted, parallel, proposals, rounds
from tests.engines.pairs import EMBEDDED, text_rows
from tests.records import records_of

PROMPTS, LENGTH, TOKENS, GAMMA = 6, 12, 24, 3
GREEDY = SamplingConfig(temperature=0.0)


@cache
def owner() -> Target:
    hardware = HardwareConfig(device="cpu", dtype="float32")
    return load_target(TargetConfig(path=str(EMBEDDED)), hardware, probed=False)


@cache
def heads() -> dict[str, Head]:
    """Of some of the target's ids, in both modes."""
    model, rows = owner().adapter.model, text_rows(24)[8:]
    ids = rows.flatten().unique()
    head = fitted(model, rows, ids=ids, wide=256)
    return {
        "eagle3": head,
        "p-eagle": parallel(head, features_of(model, rows)[0], token=4095),
    }


@pytest.mark.parametrize("name", ["eagle3", "p-eagle"])
def test_a_head_from_elsewhere_accepts_what_the_formulas_say(tmp_path: Path, name: str) -> None:
    """In our decoder and in what scored texts predict."""
    target, head = owner(), heads()[name]
    draft = load_draft(DraftConfig(path=str(head.write(tmp_path))), target)
    prompts = text_rows(PROMPTS)[:, :LENGTH].tolist()
    options: dict[str, Any] = {"sampling": GREEDY, "seed": 0}
    requests = make_requests(prompts, max_new_tokens=TOKENS, gamma=GAMMA, **options)
    made = decode(
        target.adapter, [*requests], eos_token_ids=(), batch_size=4, proposer=drafting(draft)
    )
    expected = []
    for one in made:
        text = torch.tensor([*one.prompt_ids, *one.output_ids])
        features, _ = features_of(target.adapter.model, text[None])
        ids = proposals(head, text, features[0], GAMMA)
        # Our rounds begin before the first token of an answer.
        end = len(text) - 1
        counts = rounds(ids, text.tolist(), begin=LENGTH - 1, end=end, capped=True)
        expected.append(counts)
        assert accepted_by_pass(one, limit=TOKENS, ends=(), capped=True) == counts
    assert sum(map(sum, expected)) > PROMPTS
    totals = score_drafts(
        target.adapter,
        {"draft": draft},
        records_of(made, GREEDY),
        sampling=GREEDY,
        batch_size=4,
        eos_token_ids=(),
        blocks=GAMMA,
    )["draft"]
    passes = totals.tokens_a_pass("alpha", GAMMA).counts
    assert passes.tolist() == pytest.approx([len(counts) for counts in expected])


Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]
KEPT = torch.arange(0, tiny.VOCAB_SIZE, 2)


@cache
def tiny_target() -> Any:
    return tiny.adapter(num_hidden_layers=8)


def written(folder: Path, edit: Edit) -> DraftConfig:
    """A head's folder after an edit of its configuration and weights."""
    target = tiny_target()
    config = head_config(target.model.config, EAGLE3, draft_ids=len(KEPT), draftkit_steps=3)
    made = adapted(new_head(target.model, config, KEPT), target=target)
    save_draft(made, tiny.byte_tokenizer(), folder)
    values = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    edit(values, weights)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors")
    return DraftConfig(path=str(folder), kind=EAGLE3)


def loaded(folder: Path, edit: Edit) -> Any:
    model = written(folder, edit)
    return load_head(model, ModelFolder(model).config, tiny_target(), dtype=torch.float32)


def renamed(old: str, new: str) -> Edit:
    def edit(_: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith(old)]:
            weights[new + name.removeprefix(old)] = weights.pop(name)

    return edit


def sets(**values: Any) -> Edit:
    return lambda config, _: config.update(values)


def gives(name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Edit:
    return lambda _, weights: weights.update({name: make(weights)})


TAKEN: dict[str, Edit] = {
    "midlayer": renamed("layers.0.", "midlayer."),
    "a prefix": renamed("", "model."),
    "another name of the class": sets(architectures=["Eagle3LlamaForCausalLM"]),
    "its layers named": sets(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}),
    "the mask of the target's ids": gives("t2d", lambda _: torch.ones(tiny.VOCAB_SIZE) > 0),
    "embeddings that are the target's": gives(
        "embed_tokens.weight",
        lambda _: tiny_target().model.get_input_embeddings().weight.detach().clone(),
    ),
}
REFUSED: dict[str, tuple[Edit, str]] = {
    "another width": (sets(hidden_size=32), "hidden_size is 32 and the target's 64"),
    "another vocabulary": (sets(vocab_size=300), "vocab_size is 300 and the target's 258"),
    "more ids than there are": (sets(draft_vocab_size=999), "draft_vocab_size is 999, of 258"),
    "norm before the residual": (sets(norm_before_residual=True), "norm_before_residual is True"),
    "norm before fc": (sets(eagle_config={"norm_before_fc": True}), "norm_before_fc is True"),
    "states behind the norm": (sets(norm_output=True), "norm_output is True"),
    "two layers": (sets(num_hidden_layers=2), "num_hidden_layers is 2"),
    "other layers": (sets(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), r"layers \[1, 3, 4\]"),
    "no fc": (renamed("fc.", "fcx."), "lacks fc.weight"),
    "a matrix of another shape": (
        gives("fc.weight", lambda weights: weights["fc.weight"][:, :64].clone()),
        r"fc.weight is \[64, 64\] and not \[64, 192\]",
    ),
    "ids that are none": (gives("d2t", lambda weights: weights["d2t"] + 200), "d2t must name ids"),
    "an id named twice": (
        gives("d2t", lambda weights: weights["d2t"] - torch.arange(len(KEPT)) // 2 * 2),
        "d2t must name ids",
    ),
}


@pytest.mark.parametrize("edit", TAKEN.values(), ids=TAKEN)
def test_a_folder_of_another_trainer_is_the_same_head(tmp_path: Path, edit: Edit) -> None:
    own, other = loaded(tmp_path / "own", lambda *_: None), loaded(tmp_path / "other", edit)
    assert torch.equal(own.kept_ids, KEPT)
    assert all(torch.equal(weight, other.weights()[name]) for name, weight in own.weights().items())
    assert own.weights().keys() == other.weights().keys()
    assert own.blocks == 3


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=REFUSED)
def test_what_engines_read_differently_or_is_of_another_target_is_refused(
    tmp_path: Path, edit: Edit, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        loaded(tmp_path / "head", edit)
    assert len(str(refused.value).splitlines()) == 1
