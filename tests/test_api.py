"""The front door: README's lines raise alpha, and each function does what its command does."""

import gc
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import draftkit
import draftkit.api
from draftkit.artifacts import read_json
from draftkit.config import (
    DataConfig,
    DecodeConfig,
    DraftConfig,
    EvaluateConfig,
    HeadConfig,
    OptimConfig,
    SamplingConfig,
    ShrinkConfig,
)
from draftkit.models.compatibility import TARGET_SHA256
from draftkit.models.files import address_of
from draftkit.models.loading import save_model
from draftkit.theory.divergences import forward_kl
from draftkit.tracking import read_metrics
from tests import tiny
from tests.engines import making
from tests.engines.heads import fitted
from tests.launching import ROOT

SHORT = OptimConfig(max_steps=4, per_device_train_batch_size=4, learning_rate=3e-4, eval_steps=4)
FEW = EvaluateConfig(max_new_tokens=12)
CHAT = "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}{% endfor %}"


def texts(count: int) -> list[str]:
    """Prompts of a few characters."""
    letters = tiny.prompts([6] * count, seed=3)
    return ["".join(chr(97 + one % 26) for one in prompt) for prompt in letters]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair in TARGET and DRAFT."""
    root = tmp_path_factory.mktemp("pair")
    target, tokenizer = tiny.model(), tiny.byte_tokenizer()
    tokenizer.chat_template = CHAT
    save_model(target, tokenizer, root / "TARGET")
    save_model(tiny.related(target), tokenizer, root / "DRAFT")
    return root


@pytest.fixture(scope="module")
def pair(folder: Path) -> draftkit.Pair:
    return load(folder)


def load(folder: Path, dtype: str = "float32") -> draftkit.Pair:
    return draftkit.load_pair(
        folder / "TARGET", folder / "DRAFT", dtype=dtype, optim=SHORT, evaluate=FEW
    )


def test_a_pair_can_be_served_as_its_target_says(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pair")
    advice = tmp_path / "pair" / "TARGET" / "generation_config.json"
    advice.write_text('{"do_sample": true, "top_k": 20}')
    paths = tmp_path / "pair" / "TARGET", tmp_path / "pair" / "DRAFT"
    assert draftkit.load_pair(*paths, sampling="model").config.sampling.top_k == 20
    own = SamplingConfig(temperature=0.7)
    assert draftkit.load_pair(*paths, sampling=own).config.sampling == own


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with layers enough for a head."""
    folder = tmp_path_factory.mktemp("deep")
    save_model(tiny.model(num_hidden_layers=7), tiny.byte_tokenizer(), folder)
    return folder


@pytest.mark.parametrize(
    "draft",
    [DraftConfig(shrink=ShrinkConfig(layers=[0])), DraftConfig(kind="eagle3")],
    ids=["cut", "head"],
)
def test_a_drafter_is_made_of_the_target_and_learns(deep: Path, draft: DraftConfig) -> None:
    pair = draftkit.load_pair(deep, draft, dtype="float32", optim=SHORT, evaluate=FEW)
    folder = Path(pair.config.draft.path)
    assert pair.draft.model.config.num_hidden_layers == 1
    assert bool(pair.draft.reads) == draft.is_head
    learned = draftkit.distill(pair, texts(60), source="target", steps=4)
    before, after = (draftkit.evaluate(one, texts(24)) for one in (pair, pair.with_draft(learned)))
    assert after.alpha.mean > before.alpha.mean
    del pair
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({}, r"^draft\.path must name a model, or how to make one of the target"),
        (
            {"shrink": ShrinkConfig(layers=1, steps=3)},
            r"^draft\.shrink\.steps must be 0: load_pair",
        ),
        ({"shrink": ShrinkConfig(layers=1, vocabulary=9)}, r"^draft\.shrink\.vocabulary must be 0"),
        (
            {"kind": "medusa", "head": HeadConfig(vocabulary=9)},
            r"^draft\.head\.vocabulary must be ",
        ),
        ({"shrink": ShrinkConfig(layers=9)}, r"^draft\.shrink\.layers"),
    ],
)
def test_a_drafter_that_cannot_be_made_is_refused(deep, draft, message):
    with pytest.raises(ValueError, match=message):
        draftkit.load_pair(deep, DraftConfig(**draft))


def test_a_drafter_that_is_its_target_fills_every_round(folder: Path) -> None:
    pair = draftkit.load_pair(folder / "TARGET", folder / "TARGET", dtype="float32", evaluate=FEW)
    judged = draftkit.evaluate(pair, texts(24))
    assert judged.acceptance_length(3).mean == pytest.approx(4)
    with pytest.raises(ValueError, match=r"^gamma must be a positive whole number, got 0"):
        judged.acceptance_length(0)


def test_timed_answers_end_where_the_context_does(pair: draftkit.Pair, monkeypatch) -> None:
    real, timed = draftkit.api.gather, []

    def watched(*models: Any, **how: Any) -> Any:
        measured = real(*models, **how)
        timed.extend(one for way in measured.timed.values() for one in way.completions)
        return measured

    monkeypatch.setattr(draftkit.api, "gather", watched)
    eager, longest = replace(pair.config.decode, compile="false"), pair.context - 4
    draftkit.evaluate(pair, tiny.prompts([longest] * 4, seed=5), timed=True, decode=eager)
    assert timed
    assert max(len(one.output_ids) for one in timed) <= 4


def test_the_lines_of_the_readme_raise_alpha(folder, monkeypatch, capsys):
    """Exactly those, on the pair in TARGET and DRAFT."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## As a library")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    lines = [line for line in block[1].splitlines() if line and not line.startswith("import")]
    assert len(lines) == 5
    assert not re.search("hydra|config", block[1], re.IGNORECASE)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"prompts": texts(200), "held_out": texts(230)[200:]}
    exec(block[1], names)
    before, after = names["before"], names["after"]
    assert after.gain(before).low > 0.05
    assert capsys.readouterr().out == f"{before.alpha} {after.alpha}\n"
    assert names["drafter"].outcome.best_step > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, r"^optim\.max_steps must be positive, got 0"),
        ({"steps": 2.5}, r"^optim\.max_steps must be a whole number"),
        ({"validation": []}, r"^validation holds no prompt: "),
        ({"validation": ["cd", "ab"]}, r"^validation: 1 of its 2 prompts are trained on"),
        ({"sampling": {"temperature": 0}}, r"^sampling must be a SamplingConfig"),
        ({"nonsense": 1}, r"^nonsense must be a section"),
    ],
)
def test_arguments_of_distill_that_cannot_be_used_are_named(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        draftkit.distill(pair, ["ab", "ef", "gh"], **arguments)


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 2.5}, {"max_new_tokens": 0}, {"seed": "a"}])
def test_arguments_of_generate_that_cannot_be_used_are_named(pair, wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be "):
        draftkit.generate(pair, "ab", **wrong)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.0, top_p=0.9),
        SamplingConfig(top_k=20),
        SamplingConfig(temperature=0.6, top_p=0.95, repetition_penalty=1.2),
    ],
)
def test_a_pair_is_judged_under_any_sampling(pair, sampling):
    """Where the sampling cuts there is an alpha of engines that draft without the cut."""
    judged = draftkit.evaluate(pair, texts(4), sampling=sampling)
    uncut = judged.alpha_uncut_draft
    assert uncut is None if sampling.temperature == 0 else uncut.mean != judged.alpha.mean


def test_a_drafter_of_no_numbers_is_not_judged(folder):
    pair = load(folder)
    next(pair.draft.parameters()).data.fill_(math.nan)
    with pytest.raises(ValueError, match="are not finite"):
        draftkit.evaluate(pair, ["ab"])


def test_what_is_exported_is_there_and_nothing_else():
    assert all(getattr(draftkit, name).__module__ for name in draftkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'distil'"):
        draftkit.distil  # noqa: B018


def test_a_loss_of_ones_own_that_is_forward_kl_trains_as_forward_kl_does(pair):
    def mine(*, target_logits, draft_logits, **rest):
        return forward_kl(target_logits=target_logits, draft_logits=draft_logits, **rest)

    named, own = (
        draftkit.distill(pair, texts(24), divergence=loss, max_length=16)
        for loss in ("forward_kl", mine)
    )
    assert named.outcome == own.outcome
    for one, other in zip(named.draft.parameters(), own.draft.parameters(), strict=True):
        assert one.equal(other)
    assert not one.equal([*pair.draft.parameters()][-1])


def test_the_loss_of_the_page_on_adding_one_trains(pair):
    page = (
        (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").partition("## A divergence")[2]
    )
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"draftkit": draftkit, "pair": pair, "prompts": texts(24)}
    exec(block[1], names)
    assert names["drafter"].outcome.steps == SHORT.max_steps


def test_prompts_may_be_text_chats_ids_or_rows(pair):
    chat = [{"role": "user", "content": "ab"}]
    ids = pair.target.tokenizer("ab").input_ids
    as_chat = pair.target.tokenizer("user:ab").input_ids
    row = {"prompt": "ab", "completion": "cd"}
    arrays = [(kind(ids), ids) for kind in (np.array, torch.tensor, tuple)]
    for prompt, expected in (
        ("ab", as_chat),
        (chat, as_chat),
        (ids, ids),
        (row, as_chat),
        ([np.int64(one) for one in ids], ids),
        *arrays,
    ):
        answer = draftkit.generate(pair, prompt, max_new_tokens=8)
        assert answer == draftkit.generate(pair, expected, max_new_tokens=8)
    plain = DataConfig(chat_template="never")
    answer = draftkit.generate(pair, "ab", max_new_tokens=8, data=plain)
    assert answer == draftkit.generate(pair, ids, max_new_tokens=8)
    both = draftkit.evaluate(pair, ["ab", ids])
    assert both.alpha == draftkit.evaluate(pair, [as_chat, ids]).alpha


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("one text", r"^prompts must be a list"),
        (["ab", ""], r"^prompt 1 holds no text"),
        *(
            (["ab", wrong], r"^prompt 1 must be .* ids from 0 to 257")
            for wrong in ([999], None, 5, math.nan, b"ab", [True], [1.0], np.array([0.5]), {1})
        ),
        (None, r"^prompts must be a list"),
        ({"prompt": "ab"}, r"^prompts must be a list"),
        (
            ["ab", [{"role": "nobody", "content": "x"}]],
            r"^prompt 1: messages\[0\] must have a role",
        ),
        ([], r"^prompts: 0 are too few"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(pair, prompts, message):
    for function in (draftkit.evaluate, draftkit.distill):
        with pytest.raises(ValueError, match=message) as error:
            function(pair, prompts)
        assert "\n" not in str(error.value)


def test_a_prompt_without_room_for_an_answer_is_named(pair):
    plain = DataConfig(chat_template="never")
    with pytest.raises(ValueError, match=r"^prompt 2 has 6 tokens.* max_length=6: raise it"):
        draftkit.distill(pair, ["abc", "de", "abcdef", "gh"], max_length=6, data=plain)


def test_whoever_proposes_the_greedy_answer_is_the_targets(pair):
    ids = torch.tensor([pair.target.tokenizer("abcabc").input_ids])
    expected = pair.target.adapter.model.generate(ids, max_new_tokens=20, do_sample=False)
    greedy, answers = SamplingConfig(temperature=0.0), {}
    for name in ("sampled", "argmax", "bigram", "prompt_lookup", "none"):
        decode = replace(pair.config.decode, proposer=name)
        options = {"max_new_tokens": 20, "sampling": greedy, "decode": decode}
        answers[name] = one = draftkit.generate(pair, ids[0].tolist(), **options)
        assert one.ids == expected[0, ids.shape[1] :].tolist()
        assert one.text == pair.target.tokenizer.decode(one.ids)
        assert one.acceptance_length == pytest.approx(20 / one.rounds)
    assert answers["none"].accepted == 0 < answers["argmax"].accepted


def test_seeds_tell_sampled_answers_apart(pair):
    answers = [draftkit.generate(pair, "once", seed=seed).text for seed in (0, 0, 1)]
    assert answers[0] == answers[1] != answers[2]


def test_a_folder_keeps_a_run_which_goes_on_and_is_no_other_runs(pair, tmp_path):
    options: dict[str, Any] = {"max_length": 16, "folder": tmp_path}
    whole = draftkit.distill(pair, texts(24), steps=4, **options)
    again = draftkit.distill(pair, texts(24), steps=4, **options)
    assert again.outcome == whole.outcome
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert steps == [4]
    with pytest.raises(ValueError, match="holds a run of other prompts or settings"):
        draftkit.distill(pair, texts(24), steps=5, **options)


def scaled(factor):
    def loss(*, target_logits, draft_logits, **rest):
        values = forward_kl(target_logits=target_logits, draft_logits=draft_logits, **rest)
        return factor * values

    return loss


def test_a_folder_is_of_one_loss_one_pair_and_one_choice_of_validation(folder, tmp_path):
    """Wherever the models lie: the same call goes on with copies of them."""
    mine, weights = tmp_path / "mine", tmp_path / "mine" / "DRAFT" / "model.safetensors"
    shutil.copytree(folder, mine)
    pair, prompts = load(mine), texts(14)
    call: dict[str, Any] = {"divergence": scaled(2.0), "max_length": 16, "steps": 2}
    call |= {"prompts": prompts[:12], "validation": prompts[12:], "folder": tmp_path / "run"}
    outcome = draftkit.distill(pair, **call).outcome

    def difference(pair: draftkit.Pair, **changed: Any) -> str:
        """What the refusal of another call names."""
        with pytest.raises(ValueError, match="other prompts or settings") as error:
            draftkit.distill(pair, **{**call, **changed})
        return str(error.value).partition("(")[2].partition(")")[0]

    assert difference(pair, divergence=scaled(3.0)) == "divergence"
    assert difference(pair, divergence="forward_kl") == "divergence"
    moved = {"prompts": prompts[:11], "validation": prompts[11:]}
    assert difference(pair, **moved) == "prompts, validation"
    save_file({k: v + 0.5 for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    assert difference(load(mine)) == "draft.path"
    assert draftkit.distill(load(folder), **call).outcome == outcome


def test_a_loss_that_cannot_be_told_from_others_gets_no_folder(pair, tmp_path):
    names: dict[str, Any] = {"torch": torch}
    exec("def loss(*, draft_logits, **rest): return draft_logits.logsumexp(-1)", names)
    for loss in (names["loss"], torch.exp):
        with pytest.raises(ValueError, match=r"^divergence: .* cannot be told .* leave folder out"):
            draftkit.distill(
                pair, texts(12), divergence=loss, max_length=16, folder=tmp_path / "run"
            )
    assert list(tmp_path.iterdir()) == []


def test_a_chat_trains_or_chooses_the_weights_and_never_both(pair, monkeypatch):
    jobs: list[Any] = []

    monkeypatch.setattr(draftkit.api, "fit", lambda config, **given: jobs.append(given))
    roles = ("user", "assistant") * 3
    chats = [[{"role": role, "content": f"{number}"} for role in roles] for number in range(8)]
    draftkit.distill(pair, chats, max_length=64)
    (job,) = jobs
    opening = len(pair.target.tokenizer("user:0").input_ids)
    training = {tuple(example.token_ids[:opening]) for example in job["texts"].examples}
    held_out = {tuple(record.prompt_ids[:opening]) for record in job["validation"]}
    assert len(training) > 1
    assert held_out
    assert not training & held_out
    with pytest.raises(ValueError, match="a chat is not split"):
        draftkit.distill(pair, chats[:1], max_length=64)


def test_what_was_distilled_is_saved_loaded_and_distilled_again(pair, tmp_path):
    fitted = draftkit.distill(pair, texts(24), max_length=16)
    fitted.save(tmp_path / "saved")
    held = [pair.with_draft(fitted), pair.with_draft(tmp_path / "saved")]
    first, second = (draftkit.evaluate(one, texts(6)).totals.as_dict() for one in held)
    assert first == second != draftkit.evaluate(pair, texts(6)).totals.as_dict()
    further = [draftkit.distill(one, texts(24), max_length=16) for one in held]
    assert further[0].outcome == further[1].outcome != fitted.outcome
    kept = Path(str(held[0].config.draft.path))
    assert kept.exists()
    held.clear()
    gc.collect()
    assert not kept.exists()


def test_a_head_is_judged_and_distilled_and_names_its_target(tmp_path):
    model = making.model(num_hidden_layers=7, num_key_value_heads=4)
    target = making.saved(model, tmp_path / "target")
    head = fitted(model, torch.arange(48).view(2, 24), ids=torch.arange(30), wide=16)
    folder = head.write(tmp_path / "head")
    pair = draftkit.load_pair(target.path, folder, dtype="float32", optim=SHORT, evaluate=FEW)
    trained = draftkit.distill(pair, texts(8), source="target")
    trained.save(tmp_path / "trained")
    assert read_json(tmp_path / "trained/config.json")[TARGET_SHA256] == address_of(target)
    again = pair.with_draft(tmp_path / "trained")
    assert draftkit.evaluate(again, texts(8)).alpha.mean > 0
    ids, greedy = tiny.prompts([6])[0], SamplingConfig(temperature=0.0)
    answer = draftkit.generate(again, ids, sampling=greedy, max_new_tokens=8)
    own = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert answer.ids == own[0, 6:].tolist()


@pytest.mark.parametrize("verification", ["speculative", "typical"])
def test_a_tree_is_judged_whole_and_typical_acceptance_never_deploys(pair, verification):
    decode = DecodeConfig(tree=6, gamma=3, compile="false", verification=verification)
    lines = []
    judged = draftkit.evaluate(
        pair, texts(8), timed=True, decode=decode, evaluate=FEW, note=lines.append
    )
    summary = judged.summary
    (said,) = [line for line in lines if line.startswith("given proposes a tree of 6 nodes")]
    assert said.endswith(f"{summary['gamma']} deep")
    assert 1 <= summary["gamma"] <= 3
    assert summary["ways"]["hybrid"]["gamma"] == 3
    exact = verification == "speculative"
    assert {way["lossless"]["passed"] for way in summary["ways"].values()} == {exact}
    if not exact:
        assert summary["verdict"] == "do_not_deploy"
        assert summary["reason"].startswith("decode.verification=typical is lossy by design")
        assert summary["best_of"] == "none"


def test_a_timed_evaluation_judges_as_the_command_does_and_leaves_the_pair(folder):
    pair = load(folder, "bfloat16")
    weights = {name: one.clone() for name, one in pair.target.adapter.model.state_dict().items()}
    held_out, lines = texts(12), []
    plain = draftkit.evaluate(pair, held_out)
    eager = replace(pair.config.decode, compile="false")
    judged = draftkit.evaluate(pair, held_out, timed=True, decode=eager, note=lines.append)
    assert judged.alpha == plain.alpha
    assert judged.summary is not None
    assert judged.summary["alpha"] == plain.alpha.as_dict()
    assert judged.summary["verdict"] in ("deploy", "do_not_deploy", "inconclusive")
    assert judged.summary["lossless"]["passed"]
    assert judged.summary["lossless"]["compared"] == 9
    assert judged.summary["speedup"]["measured"] > 0
    assert lines[0].startswith("12 prompts became a user turn")
    assert lines[1].startswith("losslessness")
    for name, one in pair.target.adapter.model.state_dict().items():
        assert one.equal(weights[name])
        assert one.dtype == weights[name].dtype
    with pytest.raises(ValueError, match="3 are too few to measure: give 4"):
        draftkit.evaluate(pair, held_out[:3], timed=True)


def test_equal_prompts_are_one_document(pair):
    judged = draftkit.evaluate(pair, ["ab", "cd", "ab", "ab"])
    assert (judged.alpha.prompts, judged.alpha.documents) == (4, 2)


def test_the_target_continues_held_out_prompts_once_for_all_drafts(pair, folder, monkeypatch):
    held_out = texts(40)[30:]
    before = draftkit.evaluate(pair, held_out)

    def absent(*_, **__):
        raise AssertionError("sampled again")

    monkeypatch.setattr("draftkit.api.target_answers", absent)
    same = draftkit.evaluate(pair.with_draft(folder / "DRAFT"), held_out)
    assert same.alpha == before.alpha
    assert same.gain(before).mean == 0


MEMORY = """
import resource, sys
import draftkit
from draftkit.config import DataConfig, EvaluateConfig, OptimConfig

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

pair = draftkit.load_pair("TARGET", "DRAFT", dtype="float32", evaluate=EvaluateConfig(
    max_new_tokens=4))
size, loaded = pair.target.adapter.weight_bytes, peak()
optim = OptimConfig(per_device_train_batch_size=2, learning_rate=1e-4)
prompts = ["ab", "cd", "ef", "gh"]
drafter = draftkit.distill(pair, prompts, steps=4, max_length=8, optim=optim)
draftkit.evaluate(pair.with_draft(drafter), prompts)
print(size, (peak() - loaded) / size)
"""


CHECKING = """
import resource, sys, threading, time
from pathlib import Path
import draftkit
from draftkit.config import Config, EvaluateConfig
from draftkit.evaluation import measure
from draftkit.evaluation.measure import Prompts, check_lossless

def held():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

def limit(more):
    used = int(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    measure.free_bytes = lambda device: more

def watch():
    while not done.wait(0.002):
        peaks.append(held())

pair = draftkit.load_pair("TARGET", "DRAFT", dtype="bfloat16")
for weight in pair.target.adapter.model.parameters():
    weight.data = weight.data.clone()  # no longer pages of the file, which would take nothing
size, done = pair.target.adapter.weight_bytes, threading.Event()
loaded, peaks = held(), []
if sys.argv[1] == "auto":
    limit(int(1.5 * size))  # where float32 would not fit
threading.Thread(target=watch).start()
options = EvaluateConfig(max_new_tokens=3, lossless=sys.argv[1])
prompts = Prompts(test=[[1, 2]] * 6, calibration=[])
check_lossless(pair.target, {"given": pair.config.draft}, prompts, Config(evaluate=options), print)
done.set()
print(size, (max(peaks) - loaded) / size)
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("mode", "least", "most"), [("float32", 0.9, 1.8), ("served", 0, 0.4), ("auto", 0, 0.4)]
)
def test_checking_identity_holds_one_copy_of_the_target(tmp_path, mode, least, most):
    """Float32 takes the room of bfloat16 once more, not twice; the served dtype takes none.

    Under a limit of the process that float32 would break, `auto` takes the served one.
    """
    save_large_pair(tmp_path, dtype=torch.bfloat16)
    size, taken = measured(CHECKING, tmp_path, mode)
    assert size > 2.6e8
    assert least < taken < most


def save_large_pair(folder: Path, dtype: torch.dtype) -> None:
    """A target of 134 M weights beside a tiny draft.

    Of 24 matrices, as a CPU without bfloat16 products copies one at a time into float32.
    """
    settings, tokenizer = tiny.model().config, tiny.byte_tokenizer()
    settings.intermediate_size, settings.num_hidden_layers = 87_500, 8
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(settings, dtype=dtype).to_empty(device="cpu")
    for weight in target.parameters():  # the law is uniform, which is as good as any here
        weight.detach().zero_()
    save_model(target, tokenizer, folder / "TARGET")
    save_model(tiny.model(seed=1), tokenizer, folder / "DRAFT")


def measured(code: str, folder: Path, *words: str) -> list[float]:
    """The numbers that `code` prints last, of a process of its own in `folder`."""
    inside = f"import os; os.chdir({str(folder)!r})\n{code}"
    command = [sys.executable, "-c", inside, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


@pytest.mark.soak
def test_distilling_holds_one_copy_of_the_target(tmp_path):
    """Of 0.5 GB, through the run and the evaluation."""
    save_large_pair(tmp_path, torch.float32)
    size, more = measured(MEMORY, tmp_path)
    assert size > 0.5e9
    assert more < 0.5
