"""What `draftkit settings` prints: every setting with a sentence, and the page docs/settings.md."""

import runpy
from pathlib import Path

import pytest

from draftkit.config import known_settings
from pipelines.settings import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def printed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["settings", *words])
    runpy.run_path(str(PAGE.parents[1] / "pipelines" / "settings.py"), run_name="__main__")


def test_the_page_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m pipelines.settings > docs/settings.md` renews it."""
    printed([], monkeypatch)
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8")


def test_every_setting_says_in_a_sentence_what_it_means_and_lines_fit_a_terminal() -> None:
    shown = page()
    for key, one in known_settings().items():
        assert len(one.metadata["rule"].says.split()) > 1, key
        assert f"\n- `{key}=" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_part_of_a_name_chooses_and_what_is_in_no_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(["gate.anchors"], monkeypatch)
    assert capsys.readouterr().out == (
        "## online.gate\n\nWhen a refitted drafter may be served.\n\n"
        "- `online.gate.anchors=64`, at least 0: held-out texts of `data` that show\n"
        "  forgetting\n"
    )
    with pytest.raises(SystemExit, match="2"):
        printed(["gama"], monkeypatch)
    assert capsys.readouterr().err == "settings: no setting has gama in its name\n"
