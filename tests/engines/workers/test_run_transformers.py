"""The program that runs in transformers' environment: its passes make up its answers."""

import io
import json
import sys
from pathlib import Path

import pytest
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from draftkit.models.loading import save_model
from tests import tiny
from tests.engines.drivers import WORKERS
from tests.engines.workers import run_transformers

LIMIT = 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_passes_are_counted_and_greedy_answers_are_the_targets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    temperature: float,
) -> None:
    assert Path(run_transformers.__file__).parent == WORKERS
    target = tiny.model()
    draft = tiny.related(target)
    draft.generation_config.update(
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    for name, model in (("target", target), ("draft", draft)):
        save_model(model, tiny.byte_tokenizer(), tmp_path / name)
    own = AssistedCandidateGenerator.update_candidate_strategy
    request = {"prompts": [[1, 2, 3], [4, 5]], "temperature": temperature, "limit": LIMIT}
    answers = {}
    for side, folder in (("plain", ""), ("drafted", str(tmp_path / "draft"))):
        monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", own)
        setting = {"target": str(tmp_path / "target"), "draft": folder}
        monkeypatch.setattr(sys, "argv", ["", json.dumps(setting | {"dtype": "float32"})])
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request | {"seed": 1}) + "\n"))
        run_transformers.main()
        hello, *lines = map(json.loads, capsys.readouterr().out.splitlines())
        assert hello["version"]
        answers[side] = lines
    for one in answers["drafted"]:
        assert len(one["counts"]) + sum(one["counts"]) == len(one["ids"]) == LIMIT
        assert 0 < max(one["counts"]) <= 3
    assert [one["counts"] for one in answers["plain"]] == [[], []]
    same = [a["ids"] == b["ids"] for a, b in zip(*answers.values(), strict=True)]
    assert all(same) == (temperature == 0)
