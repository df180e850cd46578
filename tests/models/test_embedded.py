"""The target that comes with the package: it loads from anywhere, is small, and has learned."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import draftkit
from draftkit.config import DataConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.config.text import EMBEDDED
from draftkit.data.corpora import Document, read_documents, split_documents
from draftkit.data.lengths import Room
from draftkit.data.prompts import RowReader
from draftkit.distillation.samplers import target_sampler
from draftkit.evaluation.compression import TextScore, score_texts
from draftkit.models.loading import Target, load_target

FOLDER = Path(draftkit.__file__).parent / "embedded"
MODEL = TargetConfig(path=EMBEDDED)
HARDWARE = HardwareConfig(device="cpu", dtype="float32")
MOST_BYTES = 16e6
STATEMENTS = 200
PROMPT_TOKENS, STATEMENT_TOKENS = 160, 48


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(MODEL, HARDWARE)


def held_out(data: DataConfig) -> list[Document]:
    return list(split_documents(list(read_documents(data)), data)["test"])


def test_it_loads_from_any_folder_and_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = load_target(MODEL, HARDWARE).tokenizer
    assert len(tokenizer) >= 4096
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES + 1e6
    assert os.path.getsize(FOLDER / "model.safetensors") < MOST_BYTES
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def scores(target: Target, documents: list[Document], windows: int) -> dict[str, TextScore]:
    reader = RowReader(target.tokenizer, DataConfig(max_length=256))
    by_domain: dict[str, list] = {}
    for document, examples in zip(documents, reader.read(documents), strict=True):
        by_domain.setdefault(document.domain, []).extend(examples)
    some = [example for examples in by_domain.values() for example in examples[:windows]]
    return score_texts(target.adapter, target.tokenizer, some, batch_size=16)


def test_it_has_learned_its_text(target: Target) -> None:
    documents = held_out(DataConfig())
    for domain, score in scores(target, documents, windows=6).items():
        assert score.bits_per_byte < 2, domain
        assert score.argmax_probability > 0.35, domain


def openings(documents: list[Document]) -> Iterator[tuple[str, str]]:
    """Held-out code up to the line on which the last statement of a function begins.

    Beside it the function alone, up to there.
    """
    for document in documents:
        code = document.row["text"]
        try:
            tree = ast.parse(code)
        except SyntaxError:  # cut where the room ended
            continue
        lines = code.splitlines(keepends=True)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions[:4]:
            end = function.body[-1].lineno - 1
            if len(function.body) > 1:
                yield "".join(lines[:end]), "".join(lines[function.lineno - 1 : end])


def parses(before: str, text: str) -> bool:
    """Whether the first line of `text`, or its first few, go on with the function `before`.

    A block is given a body.
    """
    lines, indented = text.splitlines(keepends=True), before.startswith(" ")
    for count in range(1, len(lines) + 1):
        added = "".join(lines[:count]).rstrip()
        for body in ("", " pass"):
            try:
                ast.parse(f"if True:\n{before}{added}{body}" if indented else before + added + body)
            except SyntaxError:
                continue
            if added:
                return True
    return False


def test_statements_parse_and_halves_of_them_do_not() -> None:
    before = "    def f(x):\n        if x:\n            y = 1\n"
    for good in ("return x", "f(\n  1,\n)", "for x in y:", "else:"):
        assert parses(before, f"        {good}\n        nonsense here(")
    for bad in ("return x +", "except:", ")", "x = = 1"):
        assert not parses(before, f"        {bad}\n")


@pytest.mark.soak
def test_at_least_half_of_sampled_statements_parse(target: Target) -> None:
    data = DataConfig(domains=["python"])
    places = list(openings(held_out(data)))[:STATEMENTS]
    assert len(places) == STATEMENTS
    prompts = [target.tokenizer(code).input_ids[-PROMPT_TOKENS:] for code, _ in places]
    sampler = target_sampler(
        target,
        SamplingConfig(),
        Room(STATEMENT_TOKENS, PROMPT_TOKENS + STATEMENT_TOKENS),
        seed=0,
        batch_size=50,
    )
    answers = sampler.sample(prompts, rows=range(STATEMENTS), version="")
    texts = [str(target.tokenizer.decode(answer.output_ids)) for answer in answers]
    count = sum(parses(before, text) for (_, before), text in zip(places, texts, strict=True))
    assert count >= STATEMENTS / 2, f"{count} of {STATEMENTS} parse"
