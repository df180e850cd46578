"""Measured engines become files of results and one page."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json, write_json
from pipelines.benchmarks.engines import main
from pipelines.plan import MANIFEST, SUMMARY
from tests.engines.test_tables import summary


def measured(folder: Path, stage: str = "measure_engine", **changes: object) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / MANIFEST, {"stage": stage})
    write_json(folder / SUMMARY, summary(**changes))
    return folder


def test_folders_are_kept_with_their_note_and_the_page_has_all(tmp_path: Path) -> None:
    results = tmp_path / "results"
    one = measured(tmp_path / "a", pair="draftkit/embedded")
    two = measured(tmp_path / "b", pair="/pairs/llama/target", plugin="mend")
    main([str(one), "--note", "As it is."], results)
    main([str(two)], results)
    assert sorted(file.name for file in (results / "engines").iterdir()) == [
        "embedded-vllm.json",
        "llama-vllm-mend.json",
    ]
    assert read_json(results / "engines" / "llama-vllm-mend.json")["pair"] == "llama"
    text = (results / "engines.md").read_text()
    assert "## embedded" in text
    assert "## llama" in text
    assert "As it is." in text


def test_a_folder_of_another_stage_is_refused(tmp_path: Path) -> None:
    other = measured(tmp_path / "a", stage="evaluate")
    with pytest.raises(SystemExit, match="holds no complete measurement"):
        main([str(other)], tmp_path / "results")
    assert not (tmp_path / "results").exists()
