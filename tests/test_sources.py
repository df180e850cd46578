"""`source` and `target.urls` as the commands see them: who samples, what is kept or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.data.rollouts import read_parts
from draftkit.models.loading import load_target
from draftkit.tracking import read_metrics
from pipelines.plan import GENERATE, TEXTS, TRAIN
from pipelines.product import plan
from pipelines.stage import ensure
from tests.distillation.serving import Engine, served
from tests.smoke import composed, models
from tests.trained import trained_target


def smoke(root: Path, *overrides: str) -> Config:
    """The smallest experiment, in `root`."""
    given = ["+experiment=smoke", f"root={root}", "tracker=none", "decode.compile=false"]
    short = ["generate.rollouts=8", "optim.max_steps=4", "optim.logging_steps=1"]
    given += ["target=local", f"target.path={trained_target()}"]
    return composed(*given, *short, "optim.save_steps=2", "optim.eval_steps=4", *overrides)


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


CASES = [
    ("fixed", []),
    ("mix", []),
    ("mix", ["source.other=fixed", "source.fraction=0.8"]),
    ("block", ["decode.gamma=3", "divergence.position_decay=0.8"]),
    ("replay", ["decode.gamma=3", "divergence.tokens=rejected"]),
    ("draft", ["optim.group_by_length=true"]),
]


@pytest.mark.parametrize(("source", "options"), CASES)
def test_every_source_trains_and_writes_no_texts(
    root: Path, source: str, options: list[str]
) -> None:
    name = "-".join([source, *(option.split("=")[1] for option in options)])
    config = smoke(root, f"source={source}", "source.refresh_steps=3", f"name={name}", *options)
    folder = ensure(TRAIN, config)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not [*folder.rglob("*.parquet")]


@pytest.mark.parametrize("source", [["source=fixed"], ["source=mix", "source.other=fixed"]])
def test_answers_that_are_not_there_are_refused_when_the_texts_are_read(
    tmp_path: Path, source: list[str]
) -> None:
    rows = [{"prompt": f"say {n} of all"} for n in range(200)] + [{"prompt": 5}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["data=local", f"data.path={path}", "data.max_rows=null", "name=answers"]
    refusal = (
        r"^source(\.other)?=fixed: there is no answer to learn \(the data hold prompts alone\)"
    )
    with pytest.raises(ValueError, match=refusal):
        ensure(TRAIN, smoke(tmp_path, *given, *source))
    assert not [*tmp_path.glob("shared/contexts"), *tmp_path.glob("answers*")]
    made = ensure(TEXTS, smoke(tmp_path, *given, "source=target"))
    summary = read_json(made / "summary.json")
    assert (summary["documents"], summary["rows_bad"]) == (200, 1)
    (line,) = summary["left_out"]
    assert line == f"data.path {path}, line 201: the prompt must be text, got int"
    with pytest.raises(ValueError, match=refusal):  # before anything runs
        ensure(TRAIN, smoke(tmp_path, *given, *source))
    assert not [*tmp_path.glob("shared/contexts"), *tmp_path.glob("answers*")]


@pytest.mark.parametrize("source", ["block", "replay"])
def test_nothing_to_draft_is_refused_by_its_key(root: Path, source: str) -> None:
    config = smoke(root, f"source={source}", "decode.gamma=0", f"name=no-{source}")
    with pytest.raises(ValueError, match=r"^decode\.gamma=0 proposes nothing") as error:
        ensure(TRAIN, config)
    assert "\n" not in str(error.value)
    assert not (root / f"no-{source}").exists()


def test_decoding_counts_only_where_texts_depend_on_it(tmp_path: Path) -> None:
    def settings(source: str) -> list[dict[str, Any]]:
        changes = [[], ["decode.gamma=2"], ["decode.verification=block"]]
        configs = [smoke(tmp_path, f"source={source}", *change) for change in changes]
        kept = [plan(TRAIN, config).settings for config in configs]
        return [{k: v for k, v in one.items() if k.startswith("decode.")} for one in kept]

    assert settings("draft") == settings("mix") == [{}, {}, {}]
    first, gamma, verification = settings("block")
    assert first == verification != gamma
    first, gamma, verification = settings("replay")
    assert first != gamma != verification != first


def test_an_engine_over_http_gives_the_rollouts_of_the_decoder(root: Path) -> None:
    # In float32: a batch and single rows may part at near-ties in bfloat16.
    greedy = ["sampling.temperature=0", "divergence.temperature=1", "hardware.dtype=float32"]
    ours = smoke(root, *greedy)
    plain = ensure(GENERATE, ours)
    target = load_target(models(ours)[0], ours.hardware)
    ends, tokenizer = target.eos_token_ids, target.tokenizer
    engine = Engine(target.adapter, ends, tokenizer.decode, tokenizer.encode)
    with served(engine):
        http = [f"target.urls=[{engine.url}]", "generate.batch_size=3"]
        asked = smoke(root, *greedy, *http)
        folder = ensure(GENERATE, asked)
    expected = [replace(record, sampler="openai") for record in read_parts(plain)]
    assert list(read_parts(folder)) == expected
    assert {request["model"] for request in engine.asked} == {"tiny"}
    # Complete: nobody is asked again, not even at another address.
    elsewhere = replace(asked, target=replace(asked.target, urls=["http://127.0.0.1:9/v1"]))
    assert ensure(GENERATE, elsewhere) == folder
