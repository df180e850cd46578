"""A pair of T5 type through the commands, as any other pair: the same ids, texts and refusals."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from scipy.stats import chisquare

import draftkit
from draftkit.artifacts import read_json
from draftkit.config import Config, DraftConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.data.splits import read_splits
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, finish, make_requests
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.models.loading import load_draft, load_model, load_target, save_model
from draftkit.serving.intake import Texts
from draftkit.theory.verification import Verifier
from pipelines.command import launch
from pipelines.plan import DISTILL, EVALUATE, EXPORT, PREPARE, TEXTS, TRAIN
from pipelines.product import SUMMARY
from pipelines.stage import ensure
from tests import tiny
from tests.numerals import pairs, write_seed
from tests.serving import running
from tests.serving.fakes import NAME, serving
from tests.smoke import smoke
from tests.theory import mutants

CPU = HardwareConfig(device="cpu", dtype="float32")
START, END = 0, 1
CPU_DEVICE = torch.device("cpu")
SIZE = ("draft.pretrain.num_hidden_layers=1", "draft.pretrain.hidden_size=32")
SHORT = "data.max_completion_tokens=16"  # of answers that an untrained target never ends


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a text and an untrained T5 lie, below `t5`.

    The id that begins its answers stands in generation_config.json alone.
    """
    folder = tmp_path_factory.mktemp("seq2seq")
    write_seed(folder / "t5", count=300, vocab_size=96)
    path = folder / "t5" / "model" / "config.json"
    config = read_json(path)
    assert config.pop("decoder_start_token_id") == START
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def config_of(root: Path, *settings: str) -> Config:
    given = (f"target.path={root / 't5' / 'model'}", f"data.path={root / 't5' / 'rows.jsonl'}")
    return smoke(root, "target=local", "data=local", *given, "data.max_rows=null", *settings)


@pytest.fixture(scope="module")
def drafter(root: Path) -> Path:
    """A new one, of the target's type, that has learned a little."""
    return ensure(PREPARE, config_of(root, *SIZE)) / "draft"


def test_ids_that_are_trained_on_judged_on_and_served_are_the_same(root: Path) -> None:
    target = load_target(TargetConfig(path=str(root / "t5" / "model")), CPU)
    examples = read_splits(ensure(TEXTS, config_of(root))).train
    served = Texts(target.tokenizer, target.adapter.vocab_size, start=target.adapter.start_id)
    rows = {tuple(target.tokenizer(row["prompt"])["input_ids"]): row for row in pairs(300)}
    for example in examples[:50]:
        *text, start = example.prompt_ids
        row = rows[tuple(text)]
        assert (text[-1], start) == (END, START)
        assert served.encode(row["prompt"]) == text
        answer = target.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        assert example.token_ids == [*text, START, *answer, END]
    assert served.encode(f"say {'<pad>'} 7").count(START) == 0  # a name is text


@pytest.mark.parametrize(
    "settings",
    [
        ("source=fixed", "divergence=ce_argmax", "generate.top_k=8"),
        ("source=target", "divergence=forward_kl", "optim.activation_checkpointing=true"),
        ("source=draft", "divergence=jsd", "optim.gradient_accumulation_steps=2"),
        ("source=mix", "divergence=tvd"),
        ("source=block", "divergence=tvd"),
        ("source=replay", "divergence=reverse_kl", "draft.lora.rank=4"),
    ],
    ids=lambda settings: settings[0],
)
def test_every_source_teaches(root: Path, settings: Sequence[str]) -> None:
    name = settings[0].replace("=", "-")
    folder = ensure(TRAIN, config_of(root, *SIZE, SHORT, *settings, f"name={name}"))
    assert read_json(folder / SUMMARY)["steps"] > 0
    made = load_model(DraftConfig(path=str(folder / "draft")), dtype="auto", device=CPU_DEVICE)
    assert made.config.model_type == "t5"


def test_it_is_distilled_judged_and_exported(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = ("draft=shrunk", "draft.shrink.layers=1", "draft.shrink.vocabulary=0")
    config = config_of(root, SHORT, *cut)
    assert launch(DISTILL, config)["alpha_after"]["mean"] > 0
    judged = read_json(ensure(EVALUATE, config) / SUMMARY)
    assert judged["lossless"]["passed"] is True
    assert judged["kind"] == "encoder-decoder"
    assert {row["engine"] for row in judged["engines"]} == {"draftkit", "transformers"}
    launch(EXPORT, config)
    folder = ensure(EXPORT, config)
    text = (folder / "launch.md").read_text(encoding="utf-8")
    assert "serve no encoder-decoder pair" in text
    assert "AutoModelForSeq2SeqLM" in text
    assert "vllm serve" not in text + (folder / "hf" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("batch_size", [1, 8])
def test_greedy_answers_are_those_of_generate(root: Path, drafter: Path, batch_size: int) -> None:
    """Token for token on 32 prompts, of a target that has learned something."""
    target = load_target(TargetConfig(path=str(drafter)), CPU)
    draft = load_draft(DraftConfig(path=str(root / "t5" / "model")), target)
    rows = [example.prompt_ids for example in read_splits(ensure(TEXTS, config_of(root))).train]
    rows, greedy = rows[:32], SamplingConfig(temperature=0.0)
    decoder = Decoder(target.adapter, slots=batch_size, capacity=96, eos_token_ids=(END,))
    decoder.attach(DRAFT_ID, DraftModelProposer(draft))
    made = finish(decoder, [*make_requests(rows, max_new_tokens=24, sampling=greedy, gamma=3)])
    for row, answer in zip(rows, made, strict=True):
        expected = target.adapter.model.generate(
            input_ids=torch.tensor([row[:-1]]), max_new_tokens=24, do_sample=False
        )[0, 1:].tolist()
        assert answer.output_ids == expected


def p_value(verifier: Verifier | None = None) -> float:
    """Of 6,000 answers of two tokens by a tiny pair, against the target's exact law."""
    target, draft = tiny.seq2seq_pair()
    text, sampling = [5, 9, 3, tiny.START], SamplingConfig(temperature=0.5)
    decoder = Decoder(target, slots=500, capacity=24)
    if verifier is not None:
        decoder.verifier = verifier
    decoder.attach(DRAFT_ID, DraftModelProposer(draft))
    made = finish(
        decoder, [*make_requests([text] * 6000, max_new_tokens=2, sampling=sampling, gamma=2)]
    )

    def law(*rows: list[int]) -> torch.Tensor:
        """[R, V] after each row, at temperature 0.5."""
        tokens = torch.tensor(rows)
        keep = (torch.arange(len(rows[0])) == len(rows[0]) - 1).expand(len(rows), -1)
        with torch.no_grad():
            return (2 * target.score(tokens, keep).double()).softmax(-1)

    first = law(text)
    pairs_of = (first.T * law(*([*text, a] for a in range(first.shape[1])))).flatten()
    ids = torch.tensor([one.output_ids for one in made])
    seen = torch.bincount(ids[:, 0] * first.shape[1] + ids[:, 1], minlength=len(pairs_of))
    often = len(made) * pairs_of > 20
    cells = [[*one[often].tolist(), float(one[~often].sum())] for one in (seen, pairs_of)]
    assert len(cells[0]) > 4
    return float(chisquare(cells[0], [len(made) * p for p in cells[1]]).pvalue)


def test_sampled_answers_have_the_targets_law() -> None:
    assert p_value() > 1e-3
    broken = mutants.verification_mutant("correction drawn afresh from the draft")
    assert p_value(broken.VERIFIERS["speculative"]) < 1e-6


def test_a_server_answers_completions_and_refuses_chats() -> None:
    target, draft = tiny.seq2seq_pair()
    text = "Say something: "
    ids = running.TOKENIZER(text)["input_ids"]
    expected = target.model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False
    )[0, 1:].tolist()
    with (
        running.serving(target, lambda: draft, adapts=True) as engine,
        serving(engine, start=tiny.START) as address,
        OpenAI(base_url=f"http://{address}/v1", api_key="none") as client,
    ):
        for prompt in (text, ids, [*ids, tiny.START]):
            options: Any = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            made = client.completions.create(**options)
            assert made.choices[0].text == running.bytes_text(expected)
        body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
        refused = httpx.post(f"http://{address}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "no chat template: use /v1/completions" in refused.json()["error"]["message"]


def test_the_library_takes_it(root: Path, drafter: Path) -> None:
    pair = draftkit.load_pair(str(root / "t5" / "model"), str(drafter))
    prompts = [row["prompt"] for row in pairs(60, seed=5)]
    learned = draftkit.distill(pair, prompts, divergence="jsd", steps=2, max_length=48)
    assert draftkit.evaluate(pair.with_draft(learned), prompts[:24]).alpha.mean > 0
    assert isinstance(draftkit.generate(pair, "say 407").text, str)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("draft.path={causal}",),
            r"draft\.path: llama is a decoder-only one, and the target \(t5",
        ),
        (
            ("draft.extra_tokens=never",),
            r"draft\.extra_tokens=never: the target is an encoder-deco",
        ),
        (("draft.kind=pard",), r"draft\.kind=pard: the target is an encoder-decoder model \(t5\)"),
        (
            ("draft.shrink.layers=1", "draft.shrink.vocabulary=9"),
            r"draft\.shrink\.vocabulary=9: the",
        ),
        (("sampling.repetition_penalty=1.1",), r"sampling\.repetition_penalty=1\.1: the target is"),
        (
            ("data.path={own}/chats.jsonl",),
            "holds `messages`, and the target is an encoder-decoder",
        ),
        (
            ("data.path={own}/plain.jsonl",),
            "holds `text`, and the target is an encoder-decoder: gi",
        ),
        (
            ("target.path={own}/no_start",),
            "t5 has no decoder_start_token_id: add the first id of d",
        ),
    ],
    ids=lambda one: one[0][:40] if isinstance(one, tuple) else "",
)
def test_refusals(root: Path, tmp_path: Path, settings: Sequence[str], message: str) -> None:
    target = load_target(TargetConfig(path=str(root / "t5" / "model")), CPU)
    save_model(tiny.model(vocab_size=len(target.tokenizer)), target.tokenizer, tmp_path / "causal")
    turns = '{"messages": [{"role": "user", "content": "a"}]}\n' * 40
    (tmp_path / "chats.jsonl").write_text(turns, encoding="utf-8")
    (tmp_path / "plain.jsonl").write_text('{"text": "a b c d"}\n' * 40, encoding="utf-8")
    model: Any = target.adapter.model
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    save_model(model, target.tokenizer, tmp_path / "no_start")
    places = {"own": tmp_path, "causal": tmp_path / "causal"}
    config = config_of(root, *(one.format(**places) for one in settings), "name=refused")
    with pytest.raises(ValueError, match=message) as error:
        launch(TRAIN, config)
    assert "\n" not in str(error.value)
