"""`evaluate certify.with=URL certify.without=URL`: two servers of draftkit, and what is refused."""

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from draftkit.artifacts import read_json
from draftkit.decoding import round as units
from draftkit.models.loading import save_model
from draftkit.theory.verification import Verification, Verifier
from pipelines import certify, evaluate
from pipelines.certify import DIFFERENT
from pipelines.command import run_command
from pipelines.product import SUMMARY
from tests import tiny
from tests.keys import missing_keys
from tests.replies import answer_by
from tests.serving import running
from tests.serving.fakes import chat_tokenizer, serving
from tests.theory import mutants

TARGET, DRAFT = tiny.pair()
SAMPLES = 32
WITH, WITHOUT = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with its arguments; its exit code."""
    save_model(tiny.model(), chat_tokenizer(), tmp_path / "target")
    rows = [{"text": f"Row {row} says: the fox jumps over {row} dogs."} for row in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(certify, "SAMPLES", SAMPLES)
    fixed = [
        *("+experiment=evaluate_pair", "name=certificate", f"root={tmp_path}", "tracker=none"),
        *(f"{key}.path={tmp_path / 'target'}" for key in ("target", "draft")),
        *("data=local", f"data.path={tmp_path}/rows.jsonl"),
        *("data.max_length=24", "data.prompt_tokens=8", "data.test_fraction=0.4"),
        *("sampling.temperature=1", "evaluate.prompts=24", "evaluate.max_new_tokens=12"),
        "decode.gamma=3",
    ]

    def run(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["evaluate", *fixed, *more])
        try:
            run_command("evaluate", evaluate.run)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


@contextmanager
def server(*, proposer: str = "sampled", verifier: Verifier | None = None) -> Iterator[str]:
    """A server of the pair; `verifier`: by which it accepts instead of the shipped one."""
    made = running.serving(TARGET, lambda: copy.deepcopy(DRAFT), proposer=proposer, slots=16)
    with made as engine:
        if verifier is not None:
            engine.decoder.verifier = verifier
        with serving(engine, tokenizer=chat_tokenizer()) as address:
            yield f"http://{address}"


def certified(command: Callable[..., int], *more: str, **parts: Any) -> int:
    with ExitStack() as stack:
        urls = [stack.enter_context(one) for one in (server(**parts), server(proposer="none"))]
        return command(f"certify.with={urls[0]}", f"certify.without={urls[1]}/v1", *more)


def test_draftkits_own_server_is_certified(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certified(command) == 0
    summary = read_json(tmp_path / "certificate" / "certify" / SUMMARY)
    assert missing_keys("certify", summary) == []
    assert summary["certified"] is True
    assert summary["greedy"]["compared"] == 24
    assert summary["sampled"]["answers"] == [24 * SAMPLES] * 2
    printed = capsys.readouterr().out
    assert "greedy: passed, 24 of 24 answers are equal" in printed
    assert "would be seen with 90 % power at level 0.01" in printed
    forms = ["if the temperature is another one", "if one answer stands in place of others"]
    assert [printed.count(form) for form in forms] == [1, 1]
    assert max(map(len, printed.split("greedy: ")[1].splitlines()[:6])) <= 80
    assert "\nCERTIFIED: http://127.0.0.1:" in printed


def accept_everything(*, target_probs: Tensor, draft_tokens: Tensor, lengths: Tensor) -> Any:
    return Verification(lengths, target_probs[:, -1].argmax(-1))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_server_that_accepts_wrongly_is_not(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    temperature: int,
) -> None:
    verifier = None
    if temperature == 0:
        monkeypatch.setattr(units, "greedy_verification", accept_everything)
    else:
        mutant = mutants.verification_mutant("correction drawn afresh from the draft")
        verifier = mutant.VERIFIERS["speculative"]
    code = certified(command, f"sampling.temperature={temperature}", verifier=verifier)
    printed = capsys.readouterr().out
    assert (code, "\nNOT CERTIFIED" in printed) == (DIFFERENT, True)
    assert f"{'temperature 1' if temperature else 'greedy'}: FAILED" in printed


def answer_of(token: str, **changes: Any) -> dict[str, Any]:
    scores = {"tokens": [token] * 3, "top_logprobs": [{token: -0.1, "z": -3.0}] * 3}
    return {"choices": [{"logprobs": scores} | changes]}


@pytest.mark.parametrize(
    ("more", "answers", "message"),
    [
        ((), {}, rf"certify\.with: {WITH} does not answer"),
        ((), {"/v1/models": {"data": []}}, rf"certify\.with: {WITH} names no model at /v1/models"),
        ((), {"/v1/completions": answer_of("a", logprobs=None)}, "returns no log-probabilities of"),
        (
            (),
            {"other": answer_of("b")},
            r"certify\.with: .* serves another model than certify\.wit",
        ),
        (
            ("data.test_fraction=0.1",),
            {},
            "held-out prompts, and 20 are needed: raise evaluate.pro",
        ),
        (("~certify.without",), {}, r"certify must name two servers by their URLs, certify\.with="),
        (("certify.with=tcp://host",), {}, "certify must name two servers by their URLs"),
        (("certify.without=${certify.with}",), {}, "certify must name two servers by their URLs"),
        (("limit=3",), {}, "limit: there is a dry run of .*, none of evaluate"),
    ],
)
def test_refusals(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    answers: dict[str, Any],
    message: str,
) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        if not answers and not more:
            raise httpx.ConnectError("refused")
        path = request.url.path
        known = {"/v1/models": {"data": [{"id": "pair"}]}, "/v1/completions": answer_of("a")}
        if "other" in answers and request.url.port == 8001 and path == "/v1/completions":
            path = "other"
        return httpx.Response(200, json=(known | answers)[path])

    answer_by(monkeypatch, reply)
    assert command(f"certify.with={WITH}", f"certify.without={WITHOUT}", *more) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert re.search(message, error), error
