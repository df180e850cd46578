"""Heads on the target's hidden states through the commands: made, trained, judged, refused."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftkit
from draftkit.artifacts import read_json
from draftkit.config import (
    Config,
    DecodeConfig,
    EvaluateConfig,
    GenerateConfig,
    OptimConfig,
    SamplingConfig,
)
from draftkit.data.rollouts import read_parts
from draftkit.decoding.decoder import Decoder
from draftkit.models import loading
from draftkit.models.loading import load_draft, load_target, save_draft, save_model
from draftkit.serving.drafters import same
from pipelines.command import launch
from pipelines.online import check_drafter, watch
from pipelines.plan import DISTILL, GENERATE, PREPARE, SERVE, TRAIN
from pipelines.product import plan
from pipelines.rollback import rollback
from pipelines.serve import drafters_of
from pipelines.service import registry_of, service_folder
from pipelines.stage import ensure, inputs_of
from tests import tiny
from tests.services import buffer_of
from tests.smoke import numbers, same_weights, smoke
from tests.test_pipelines import kill_when
from tests.trained import trained_target

pytestmark = pytest.mark.usefixtures("one_pass")
EAGLE3 = "draft.kind=eagle3"
KINDS = {
    "eagle3": (EAGLE3, "draft.head.steps=3"),
    "p-eagle": (EAGLE3, "draft.head.parallel=true", "draft.head.tokens=4"),
    "medusa": ("draft.kind=medusa", "draft.head.tokens=4"),
}


def on_seven(root: Path, *overrides: str) -> Config:
    """The smallest experiment, on a target of seven layers."""
    deep = [f"target.path={trained_target('data.max_rows=100', layers=7)}", "target=local"]
    return smoke(root, *deep, *overrides)


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    """A finished smoke experiment."""
    launch(DISTILL, on_seven(root, *KINDS["eagle3"]))
    return root / "smoke"


def test_a_head_is_trained_and_judged(finished: Path) -> None:
    config = read_json(finished / "distill" / "draft" / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draftkit_steps"] == 3
    lines = numbers(finished / "train")
    losses = [one["loss"] for one in lines if "loss" in one]
    assert losses[-1] < losses[0]
    assert "tau_3" in [one for one in lines if one["section"] == "validation"][-1]
    judged = read_json(finished / "evaluate" / "summary.json")
    assert judged["lossless"]
    assert judged["acceptance_length"]["mean"] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_with_the_targets_own_weights(
    root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on_seven(root, *KINDS[kind], "draft.head.vocabulary=64")
    made = ensure(PREPARE, config)
    kept, note = load_file(made / "draft" / "model.safetensors"), capsys.readouterr().out
    whole = load_file(Path(str(config.target.path)) / "model.safetensors")
    ids = kept["d2t"] + torch.arange(len(kept["d2t"]))
    assert torch.equal(kept["lm_head.weight"], whole["model.embed_tokens.weight"][ids])
    assert "embed_tokens.weight" not in kept
    reads = "7" if kind == "medusa" else "2, 3, 4"
    assert f"the head reads the hidden states behind {reads} layers of the target" in note
    records = read_parts(plan(GENERATE, config).folder)
    own = [token for record in records[::10] for token in record.output_ids]
    share = sum(token in ids for token in own) / len(own)
    assert f"keeps {len(ids)} ids" in note
    assert f"{share:.1%} of the target's own answers" in note


def test_a_smaller_vocabulary_is_taken_whole(finished: Path) -> None:
    kept = load_file(finished / "train" / "draft" / "model.safetensors")
    assert "d2t" not in kept
    assert len(kept["lm_head.weight"]) == 512


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(("eagle3", source) for source in ("fixed", "block", "replay")),
        *(("p-eagle", source) for source in ("target", "block")),
        *(("medusa", source) for source in ("target", "block")),
    ],
)
def test_every_source_trains_it(root: Path, kind: str, source: str) -> None:
    name = f"name={kind}_by_{source}"
    config = on_seven(root, *KINDS[kind], f"source={source}", name, "optim.learning_rate=3e-3")
    lines = [line for line in numbers(ensure(TRAIN, config)) if "loss" in line]
    assert lines[-1]["step"] == config.optim.max_steps
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_hidden_states_that_are_stored_teach_like_those_of_a_pass(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a training that has no target in memory; they are rounded to bfloat16."""
    save_model(tiny.model(num_hidden_layers=7), tiny.byte_tokenizer(), tmp_path / "target")
    given = (*KINDS[kind], f"target.path={tmp_path / 'target'}", "hardware.dtype=float32")
    given += ("optim.logging_steps=1", "optim.max_steps=4", "optim.learning_rate=1e-3")
    stored = ("generate.top_k=257", "generate.hidden_states=true")
    losses = []
    for name, more in (("pass", ()), ("stored", stored)):
        folder = ensure(TRAIN, on_seven(tmp_path, *given, *more, f"name={name}"))
        losses.append([one["loss"] for one in numbers(folder) if "loss" in one])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    width = 64 if kind == "medusa" else 3 * 64
    told = f"hidden states take about < 0.1 GB on the disk: {2 * width} bytes"
    assert told in capsys.readouterr().out


def test_a_killed_training_ends_like_an_uninterrupted_one(root: Path, finished: Path) -> None:
    given = (*KINDS["eagle3"], "optim.save_steps=3")
    folder = root / "killed" / "train"
    config = on_seven(root, *given, "name=killed")
    kill_when(lambda: (folder / "checkpoint.safetensors").exists(), TRAIN, config)
    ensure(TRAIN, config)
    whole = ensure(TRAIN, on_seven(root, *given, "name=whole"))
    assert same_weights(first=folder / "draft", second=whole / "draft")


def test_training_goes_on_from_a_head_for_longer_chains(root: Path, finished: Path) -> None:
    start = f"draft.path={finished / 'train' / 'draft'}"
    for given, steps in (((), 3), ((EAGLE3, "draft.head.steps=5"), 5)):
        config = on_seven(root, start, *given, f"name=on_{steps}", "optim.max_steps=2")
        made = read_json(ensure(TRAIN, config) / "draft" / "config.json")
        assert made["draftkit_steps"] == steps


def test_settings_of_heads_make_no_other_drafter_anew(root: Path) -> None:
    steps = ("draft.head.steps=5", "draft.kind=pard")
    plain, other = (plan(PREPARE, smoke(root, *given)).folder for given in ((), steps))
    assert plain == other
    heads = {plan(PREPARE, on_seven(root, *given)).folder for given in KINDS.values()}
    assert len(heads) == 3


REFUSED = {
    "draft.shrink.layers=2": r"draft\.shrink\.layers must be 0 with draft\.kind=eagle3, got 2",
    "draft.lora.rank=4": r"draft\.lora\.rank must be 0 with draft\.kind=eagle3, got 4",
    "draft.head.vocabulary=600": r"draft\.head\.vocabulary: 600 of 512 ids .*: lower it, or",
    "source=draft": "source=draft: a head .* writes no text alone: use source=target",
    "generate.top_k=8": "generate.top_k=8: a head reads .*: use generate.hidden_states=true",
    "source=mix": "source=mix: a head .* writes no text alone: use source=target",
    "optim.activation_checkpointing=true": r"optim\.activation_checkpointing=true must be false",
    "draft.kind=medusa draft.head.parallel=true": r"draft\.head\.parallel must be false with",
    "target.path={shallow}": r"draft\.kind=eagle3: the target has 2 layers, .* at least 7: use",
    "draft.path={shallow}": r"draft\.path .*: a drafter of the kind plain, .* draft\.kind=plain$",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_no_head_can_do_is_refused_at_once(tmp_path: Path, given: str) -> None:
    words = given.format(shallow=trained_target("data.max_rows=100")).split()
    with pytest.raises(ValueError, match=REFUSED[given]) as error:
        launch(TRAIN, on_seven(tmp_path, EAGLE3, *words))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("draft.kind=medusa",), "a drafter of the kind eagle3, .*: give draft.kind=eagle3"),
        (("draft.kind=pard",), "a drafter of the kind eagle3, .*: give draft.kind=eagle3"),
        ((EAGLE3, "draft.head.parallel=true"), "draft.head.parallel=true must be false"),
        (("draft.lora.rank=4",), "draft.lora.rank=4 must be 0"),
        (("source=draft",), "source=draft: a head"),
        (("target.path={other}",), "hidden_size is 64 and the target's 32: .* another target"),
    ],
)
def test_a_head_is_what_its_folder_says(
    root: Path, finished: Path, tmp_path: Path, given: tuple[str, ...], told: str
) -> None:
    words = [word.format(other=tmp_path / "other") for word in given]
    narrow = tiny.model(hidden_size=32, num_hidden_layers=7)
    narrow.save_pretrained(tmp_path / "other")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "other")
    start = f"draft.path={finished / 'train' / 'draft'}"
    with pytest.raises(ValueError, match=told) as error:
        launch(TRAIN, on_seven(root, start, "name=refused", *words))
    assert "\n" not in str(error.value)
    assert not (root / "refused" / "train").exists()


SERVED = ("source=target", "online.min_records=24", "online.steps=40", "online.gate.records=48")
SERVED += ("online.anchor_fraction=0", "online.gate.anchors=0", "online.most_updates=1")
SERVED += ("optim.learning_rate=3e-3", "hardware.dtype=float32")


def test_a_head_is_refitted_from_what_was_served_swapped_in_and_taken_back(root: Path) -> None:
    """The first version is the head as it was made, which has much to learn."""
    config = on_seven(root, EAGLE3, *SERVED, "name=served")
    made, records = inputs_of(SERVE, config), read_parts(ensure(GENERATE, config))
    with closing(buffer_of(config)) as buffer:
        for turn in range(6):  # under prompts that differ
            answers = (replace(one, prompt_ids=[turn, *one.prompt_ids[1:]]) for one in records)
            buffer.append([("default", replace(one, document="")) for one in answers])
    watch(config, service_folder(config), Event())
    first, second = registry_of(config, "default").versions()
    assert second.metrics["gain"]["mean"] > 0
    assert "tokens a pass" in second.metrics["reason"]
    target = load_target(made.model(config, "target"), config.hardware)
    drafters = drafters_of(config, made, target)
    ends = target.eos_token_ids
    drafters.attach(Decoder(target.adapter, slots=1, capacity=64, eos_token_ids=ends))
    for version in (second, first):
        drafters.poll()
        assert drafters.versions() == {"default": version.name}
        weights = drafters.routes["default"].proposer.weights()
        assert same(weights, load_file(version.path / "model.safetensors"))
        if version is second:
            rollback(config)


def test_a_head_learns_from_no_stored_scores(root: Path) -> None:
    words = (EAGLE3, "online.teacher=stored")
    with pytest.raises(ValueError, match=r"^draft\.kind=eagle3 needs online\.teacher=target: a "):
        check_drafter(on_seven(root, *words))


def test_the_library_takes_a_head(root: Path, finished: Path) -> None:
    target = trained_target("data.max_rows=100", layers=7)
    few = {
        "optim": OptimConfig(max_steps=4, per_device_train_batch_size=4),
        "generate": GenerateConfig(rollouts=8),
        "evaluate": EvaluateConfig(max_new_tokens=8, validation_prompts=4),
    }
    pair = draftkit.load_pair(target, finished / "train" / "draft", dtype="float32", **few)
    prompts = [f"def number_{number}(text):\n    return" for number in range(40)]
    fitted = draftkit.distill(pair, prompts[:20], source="target", max_length=40)
    pairs = (pair, pair.with_draft(fitted))
    before, after = (draftkit.evaluate(one, prompts[20:]).alpha for one in pairs)
    assert fitted.outcome.steps == 4
    assert after.n == before.n > 0
    greedy = {"sampling": SamplingConfig(temperature=0), "max_new_tokens": 8}
    first, second = (
        draftkit.generate(pair, prompts[0], decode=DecodeConfig(proposer=name), **greedy).ids
        for name in ("sampled", "none")
    )
    assert first == second


def test_embeddings_of_its_own_stay_with_a_head(root: Path, finished: Path, tmp_path: Path) -> None:
    config = on_seven(root, EAGLE3)
    folder = shutil.copytree(finished / "train" / "draft", tmp_path / "own")
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = torch.randn(512, 64)
    save_file(weights, folder / "model.safetensors")
    target = load_target(config.target, config.hardware, dtype=torch.float32)
    draft = load_draft(replace(config.draft, path=str(folder)), target, dtype=torch.float32)
    save_draft(draft, target.tokenizer, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(saved["embed_tokens.weight"], weights["embed_tokens.weight"])


def test_a_target_that_hides_its_layers_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hiding(model: object) -> None:
        raise ValueError

    monkeypatch.setattr(loading, "layer_stack", hiding)
    told = r"^draft\.kind=eagle3: llama does not show its layers, .*: use draft\.kind=plain$"
    with pytest.raises(ValueError, match=told):
        launch(TRAIN, on_seven(tmp_path, EAGLE3))
    assert not list(tmp_path.rglob("manifest.json"))
