"""The study of engines, on transformers, which every installation has, and its page."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from tests.engines import making, study
from tests.engines.test_tables import summary


def test_transformers_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "TURNS", 1)
    monkeypatch.setattr(study, "TOKENS", 16)
    target = making.model(num_hidden_layers=2)
    making.saved(target, tmp_path / "target")
    making.saved(making.tiny.related(target), tmp_path / "draft")
    made = study.measure("transformers", tmp_path, tmp_path / "target", tmp_path / "draft", count=6)
    assert [(c["drafts"], c["temperature"]) for c in made["cells"]] == [
        ("sampled", 0.0),
        ("sampled", 1.0),
    ]
    # Greedy, both count the very same passes, and the answers are the target's own.
    cell = made["cells"][0]
    assert cell["difference"]["mean"] == 0
    assert cell["counted_by_position"] == cell["predicted_by_position"]
    assert cell["counted"]["mean"] > 1.2
    assert made["greedy"] == [
        {"drafts": "sampled", "compared": 6, "same_as_plain": 6, "same_as_ours": 6}
    ]
    assert made["cells"][1]["agrees"]
    assert cell["speed"]["speedup"]["least"] > 0


def test_measurements_are_kept_with_their_note_and_the_page_has_all(tmp_path: Path) -> None:
    study.keep(summary(), "embedded", "As it is.", tmp_path)
    study.keep(summary(plugin="mend"), "llama", "", tmp_path)
    assert sorted(file.name for file in (tmp_path / "engines").iterdir()) == [
        "embedded-vllm.json",
        "llama-vllm-mend.json",
    ]
    assert read_json(tmp_path / "engines" / "llama-vllm-mend.json")["pair"] == "llama"
    text = (tmp_path / "engines.md").read_text()
    assert "## embedded" in text
    assert "## llama" in text
    assert "As it is." in text
