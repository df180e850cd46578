"""Golden numbers: what runs at a fixed seed gave, before the house was rebuilt, must stay.

In float32, on one thread, under the pins of constraints.txt: losses within 1e-5 of themselves,
tokens equal, keys of summaries present (keys.json), refusals to the word. The numbers lie in
golden.json; one that changes with a reason is written there by hand, and the reason into the
commit.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import draftkit
from draftkit.artifacts import read_json
from draftkit.config import Config, DecodeConfig, SamplingConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import drafting
from draftkit.decoding.trees import usual_tree
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.plan import DISTILL, TRAIN
from pipelines.stage import ensure
from tests.keys import missing_keys
from tests.smoke import TEXT, numbers, paths_of, smoke

pytestmark = pytest.mark.usefixtures("one_pass")
GOLDEN: dict[str, Any] = read_json(Path(__file__).with_name("golden.json"))
STEPS, ANSWERS = 20, 16
PARD = ("draft.kind=pard", "draft.pard.tokens=4", "name=pard")
HEADS = ("eagle3", "peagle", "medusa")
EACH_STEP = (f"optim.max_steps={STEPS}", "optim.eval_steps=10", "optim.logging_steps=1")
HERE = ("tracker=none", "hardware.dtype=float32", "hardware.device=cpu", "hardware.threads=1")


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-5)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of outputs with the text of all runs: golden numbers are of no corpus."""
    folder = tmp_path_factory.mktemp("outputs")
    lines = [TEXT.format(i, i * 7, i * 13) for i in range(600)]
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(0, len(lines), 5):
            file.write(json.dumps({"text": " ".join(lines[i : i + 5])}) + "\n")
    return folder


def texts_of(root: Path) -> list[str]:
    return [
        "data=local",
        f"data.path={root / 'rows.jsonl'}",
        "data.max_rows=null",
        "data.test_fraction=0.2",
    ]


def small(root: Path, *overrides: str) -> Config:
    """The smallest experiment, on that text, every step logged."""
    return smoke(root, *texts_of(root), *EACH_STEP, *HERE, *overrides)


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    """The folder of a finished smoke experiment."""
    launch(DISTILL, small(root))
    return root / "smoke"


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in numbers(folder) if line["section"] == "train"]


def alphas(folder: Path) -> list[float]:
    return [line["alpha"] for line in numbers(folder) if line["section"] == "validation"]


def answers(root: Path, draft: Path) -> list[list[int]]:
    """Tokens that the target and the drafter in `draft` generate together, at temperature 1."""
    pair = draftkit.load_pair(paths_of(small(root))[0], draft, device="cpu", dtype="float32")
    decoding = DecodeConfig(gamma=3, compile="false")
    return [
        draftkit.generate(
            pair, TEXT.format(i, i, i)[: 20 + i], max_new_tokens=12, decode=decoding
        ).ids
        for i in range(ANSWERS)
    ]


def test_a_run_learns_as_it_did(finished: Path) -> None:
    assert losses(finished / "train") == near(GOLDEN["smoke"]["losses"])
    assert alphas(finished / "train") == near(GOLDEN["smoke"]["alphas"])
    summary = read_json(finished / "distill" / "summary.json")
    judged = [summary[f"alpha_{when}"]["mean"] for when in ("before", "after")]
    assert judged == near(GOLDEN["smoke"]["judged"])


def test_answers_are_the_same_tokens(finished: Path, root: Path) -> None:
    assert answers(root, finished / "distill" / "draft") == GOLDEN["smoke"]["answers"]


def embedded(root: Path, *overrides: str) -> Config:
    """The quickstart, smaller, on that text."""
    given = ["+experiment=quickstart", f"root={root}", *texts_of(root), *EACH_STEP, *HERE]
    given += ["optim.per_device_train_batch_size=4"]
    given += ["evaluate.validation_prompts=6", "evaluate.prompts=6"]
    given += ["evaluate.max_new_tokens=16", "data.max_length=64", "data.prompt_tokens=16"]
    return compose_config([*given, *overrides])


def test_quickstart_learns_as_it_did(root: Path) -> None:
    """On the embedded target, with the drafter that is cut out of it."""
    folder = ensure(TRAIN, embedded(root, "draft.kind=plain", "draft.shrink.steps=4"))
    assert losses(folder) == near(GOLDEN["quickstart"]["losses"])
    assert alphas(folder) == near(GOLDEN["quickstart"]["alphas"])


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_learns_and_proposes_as_it_did(root: Path, kind: str) -> None:
    """Medusa's heads as a tree. Answers are sampled, so the draft has its part in each token."""
    config = embedded(
        root, f"draft={kind}", "draft.head.vocabulary=512", "source=fixed", f"name={kind}"
    )
    folder = ensure(TRAIN, config)
    pair = draftkit.load_pair(config.target.path, folder / "draft", device="cpu", dtype="float32")
    tree = usual_tree(12, 4) if kind == "medusa" else None
    prompts = [pair.target.tokenizer.encode(TEXT.format(i, i, i))[: 4 + i] for i in range(ANSWERS)]
    done = decode(
        pair.target.adapter,
        [
            *make_requests(
                prompts, max_new_tokens=12, sampling=SamplingConfig(temperature=0.5), gamma=4
            )
        ],
        eos_token_ids=[],
        batch_size=5,
        proposer=drafting(pair.draft, tree=tree),
    )
    found = {"losses": losses(folder), "alphas": alphas(folder)}
    assert found == {name: near(GOLDEN[kind][name]) for name in found}
    assert [one.output_ids for one in done] == GOLDEN[kind]["answers"]
    assert [one.accept_counts for one in done] == GOLDEN[kind]["accepted"]


def test_a_parallel_drafter_learns_as_it_did(root: Path, finished: Path) -> None:
    assert losses(ensure(TRAIN, small(root, *PARD))) == near(GOLDEN["pard"]["losses"])


def test_summaries_keep_their_keys(finished: Path, root: Path) -> None:
    files = [*finished.glob("*/summary.json"), *root.glob("shared/*/*/summary.json")]
    stages = [read_json(file.parent / "manifest.json")["stage"] for file in files]
    assert {*stages} >= {"texts", "prepare", "generate", "contexts", "train", "evaluate", "distill"}
    for stage, file in zip(stages, files, strict=True):
        assert missing_keys(stage, read_json(file)) == []


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(("command", "overrides", "line"), GOLDEN["refusals"])
def test_a_refusal_is_the_same_line(
    command: str,
    overrides: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2, and no stage folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.jsonl").write_text('{"prompt": "half\n')
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", [command, "tracker=none", *overrides])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"pipelines.{command}", run_name="__main__")
    assert (end.value.code, capsys.readouterr().err) == (2, f"{line}\n")
    assert not list(tmp_path.rglob("manifest.json"))
