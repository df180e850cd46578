"""The program that runs in ONNX Runtime GenAI's environment, against a double of its module."""

import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engines.drivers import WORKERS
from tests.engines.workers import run_onnx


class Generator:
    """Writes one token after the other; its counts are those that a real one gave for 8 tokens.

    Version 0.18 accepted 5 of its proposals in 4 rounds, and discarded a token beyond the limit.
    """

    def __init__(self, model: str, params: Any) -> None:
        self.params, self.ids = params, []

    def append_tokens(self, ids: list[int]) -> None:
        self.ids += ids

    def is_done(self) -> bool:
        return len(self.ids) >= self.params.options["max_length"]

    def generate_next_token(self) -> None:
        self.ids.append(7)

    def get_sequence(self, number: int) -> list[int]:
        return self.ids

    def get_speculative_stats(self) -> dict[str, Any]:
        assert self.params.speculative == {"max_draft_tokens": 4, "min_adaptive_k": 0}
        return {"rounds": 4, "draft_tokens_accepted": 5, "tokens_discarded": 1}


class Params:
    def __init__(self, model: str) -> None:
        self.options: dict[str, Any] = {}
        self.speculative: dict[str, Any] = {}

    def set_search_options(self, **options: Any) -> None:
        self.options = options

    def set_speculative_options(self, **options: Any) -> None:
        self.speculative = options


@pytest.mark.parametrize("drafted", [True, False])
def test_answers_and_counts_go_out_as_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drafted: bool
) -> None:
    assert Path(run_onnx.__file__).parent == WORKERS
    double: Any = ModuleType("onnxruntime_genai")
    double.__version__, double.Model = "0.18.0", str
    double.GeneratorParams, double.Generator = Params, Generator
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", double)
    setting = {"target": "folder", "draft": drafted, "gamma": 4}
    monkeypatch.setattr(sys, "argv", ["", json.dumps(setting)])
    request = {"prompts": [[1, 2], [3]], "temperature": 0, "limit": 8, "seed": 1}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request) + "\n"))
    run_onnx.main()
    hello, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert hello == {"version": "0.18.0"}
    assert [one["ids"] for one in lines] == [[7] * 8] * 2
    counted = (4, 4) if drafted else (0, 0)  # passes and accepted make up the answer
    assert [(one["passes"], one["accepted"]) for one in lines] == [counted] * 2
