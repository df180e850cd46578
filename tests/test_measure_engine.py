"""The command that measures an engine, on transformers, which every installation has."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftkit.engines import drivers
from draftkit.engines.counts import Answer
from pipelines.measure_engine import measure_engine, within
from pipelines.plan import SUMMARY
from tests.engines import making
from tests.smoke import smoke

SMALL = ["engine.prompts=6", "engine.max_new_tokens=16", "engine.turns=2", "hardware.threads=1"]


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A pair that agrees in part, by the words of a command."""
    target = making.model(num_hidden_layers=2)
    making.saved(target, tmp_path / "target")
    making.saved(making.tiny.related(target), tmp_path / "draft")
    paths = [f"{key}.path={tmp_path / key}" for key in ("target", "draft")]
    return [*paths, "evaluate.draft=given", "decode.gamma=3", *SMALL]


def test_transformers_is_measured(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = measure_engine.launch(smoke(tmp_path, *given, "engine.turns=1"))
    assert [(c["drafts"], c["temperature"]) for c in summary["cells"]] == [
        ("sampled", 0.0),
        ("sampled", 1.0),
    ]
    # Greedy, both count the very same passes, and the answers are the target's own.
    cell = summary["cells"][0]
    assert cell["difference"]["mean"] == 0
    assert cell["counted_by_position"] == cell["predicted_by_position"]
    assert cell["counted"]["mean"] > 1.2
    assert summary["greedy"] == [
        {"drafts": "sampled", "compared": 6, "same_as_plain": 6, "same_as_ours": 6}
    ]
    assert summary["cells"][1]["agrees"]
    assert cell["speed"]["speedup"]["least"] > 0
    assert "counted is what was predicted" in capsys.readouterr().out
    assert (tmp_path / "smoke" / "engine=transformers" / "export" / "hf").is_dir()


class Recited:
    """An engine that says the same of every prompt, whenever it comes."""

    version = "1"

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def answers(self, prompts: list[list[int]], **options: Any) -> list[Answer]:
        self.seeds.append(options["seed"])
        if self.seeds.count(1) == 3 and options["seed"] == 1:
            raise KeyboardInterrupt  # in the second turn, by its second temperature
        return [Answer(ids=[1, 2, 3], seconds=0.1, passes=1, accepted=1) for _ in prompts]


def test_a_killed_run_goes_on_with_the_turn_that_it_was_in(
    tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recited()

    @contextmanager
    def start(_: drivers.Launch) -> Iterator[Recited]:
        yield engine

    own = drivers.DRIVERS["transformers"]
    monkeypatch.setitem(drivers.DRIVERS, "transformers", replace(own, start=start))
    config = smoke(tmp_path, *given)
    with pytest.raises(KeyboardInterrupt):
        measure_engine.launch(config)
    folder = measure_engine.path(config)
    assert folder == tmp_path / "smoke" / "engine=transformers" / "measure_engine"
    assert not (folder / SUMMARY).exists()
    kept = sorted(file.name for file in (folder / "answers").glob("[ps]*-*.json"))
    assert kept == ["plain-0.json", "sampled-0.json", "sampled-1.json"]
    engine.seeds.clear()
    summary = measure_engine.launch(config)
    assert engine.seeds == [0, 1, 1]  # a warm-up, and the turn that was cut, at two temperatures
    assert summary["cells"][0]["counted"]["mean"] == 2
    assert summary["cells"][0]["counted_by_position"] is None


def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    tmp_path: Path, given: list[str]
) -> None:
    for words, message in (
        (["engine=vllm", f"engine.environment={tmp_path}"], r"^engine\.environment: there is no"),
        (["engine.drafts=[argmax]"], r"^engine\.drafts: transformers drafts sampled, not argmax"),
        (["decode.gamma=0"], r"^decode\.gamma=0 proposes nothing"),
    ):
        config = smoke(tmp_path / "out", *given, *words)
        with pytest.raises(ValueError, match=message):
            measure_engine.launch(config)
    assert not (tmp_path / "out" / "smoke").exists()


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for words, message in (
        (["engine.url=http://x"], r"^engine\.url must be that of vllm or llamacpp"),
        (["engine.plain_url=http://x"], r"^engine\.plain_url must stand beside engine\.url"),
        (["engine=vllm", "engine.url=http://x"], r"^engine\.drafts must name the one way"),
        (["engine.plugin=x"], r"^engine\.plugin must be null but for engine=vllm"),
    ):
        with pytest.raises(ValueError, match=message):
            smoke(tmp_path, *words)


def test_each_engine_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = smoke(tmp_path, "engine=vllm", "engine.plugin=mend")
    assert within(config) == "engine=vllm-mend"
    config.job = "seed=1"
    folder = measure_engine.path(config)
    assert folder == tmp_path / "smoke" / "seed=1,engine=vllm-mend" / "measure_engine"
