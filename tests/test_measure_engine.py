"""What a server counts beside what is predicted, of servers that speak as the engines do.

They decode by our decoder, so what they count is what is predicted but for chance.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftkit.artifacts import read_json
from draftkit.config import DraftConfig, HardwareConfig, TargetConfig
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.engines import counters
from draftkit.models.loading import load_draft, load_target
from pipelines.command import launch
from pipelines.plan import MEASURE_ENGINE
from pipelines.product import SUMMARY
from tests.engines import making
from tests.engines.counts import Answer, OurDecoder
from tests.keys import missing_keys
from tests.replies import answer_by
from tests.smoke import smoke

GAMMA, SECRET, URL = 3, "S3CRET", "http://127.0.0.1:8000"
WORDS = making.TEXT[0].split()


class Engine:
    """Decodes, and counts as `name` does; `reply` is what its server answers."""

    def __init__(self, name: str, pair: Path, *, drafts: bool = True, others: int = 0) -> None:
        self.name, self.drafts, self.others = name, drafts, others
        self.tokens, self.accepted, self.passes, self.positions = 0, 0, 0, [0] * GAMMA
        self.lag, self.before = 0, ""  # readings of the counters that do not hold the last answer
        self.requests: list[dict[str, Any]] = []
        self.target = load_target(
            TargetConfig(path=str(pair / "target")), HardwareConfig(device="cpu", dtype="float32")
        )
        draft = load_draft(DraftConfig(path=str(pair / "draft")), self.target)
        self.decoder = OurDecoder(
            target=self.target.adapter,
            proposer=DraftModelProposer(draft),
            ends=self.target.eos_token_ids,
            gamma=GAMMA,
            capped=name == "llama.cpp",
        )

    def answer(self, request: dict[str, Any]) -> Answer:
        self.requests.append(request)
        made = self.decoder.answer(
            request["prompt"],
            temperature=request["temperature"],
            limit=request["n_predict" if self.name == "llama.cpp" else "max_tokens"],
            seed=request["seed"],
        )
        self.before, self.lag = self.metrics(), 2
        self.tokens += len(made.ids) + self.others
        self.passes += len(made.accepted)
        self.accepted += sum(made.accepted)
        self.positions = [n + made.at_least(at) for at, n in enumerate(self.positions, 1)]
        return made

    def metrics(self) -> str:
        """As Prometheus reads them; nothing of speculation without a drafter."""
        name = self.name.lower()
        values = {"generation_tokens_total": self.tokens}
        if self.drafts and self.name == "SGLang":
            values |= {"spec_verify_calls_total": self.passes, "spec_num_steps": GAMMA}
        elif self.drafts:
            values["spec_decode_num_drafts_total"] = self.passes
            values["spec_decode_num_accepted_tokens_total"] = self.accepted
        lines = [f'{name}:{key}{{engine="0"}} {value}.0' for key, value in values.items()]
        if self.drafts and self.name == "vLLM":
            key = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{key}{{position="{at}"}} {n}.0' for at, n in enumerate(self.positions)]
        return "\n".join(lines) + "\n"

    def reply(self, request: httpx.Request) -> httpx.Response:
        """To clients that have the key."""
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return httpx.Response(401)
        path, body = request.url.path, json.loads(request.content or "{}")
        if self.name == "llama.cpp" and path == "/props":
            return httpx.Response(200, json={"build_info": "b1-0c1e570"})
        if self.name == "llama.cpp" and path == "/completion":
            if body["repeat_last_n"] < 0:  # which llama-server refuses
                return httpx.Response(400)
            made = self.answer(body)
            # It counts what is proposed, not the passes, and proposes nothing past the end.
            ended, passes = made.ids[-1] in self.target.eos_token_ids, len(made.accepted)
            drafted = passes * GAMMA - (0 if ended else min(1, passes))
            counted = {"draft_n": drafted, "draft_n_accepted": sum(made.accepted)}
            timings = {"predicted_n": len(made.ids), **(counted if self.drafts else {})}
            stop = "eos" if ended else "limit"
            return httpx.Response(200, json={"timings": timings, "stop_type": stop})
        if self.name != "llama.cpp" and path == "/metrics":
            self.lag -= 1
            return httpx.Response(200, text=self.before if self.lag >= 0 else self.metrics())
        if self.name != "llama.cpp" and path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "pair"}]})
        if self.name != "llama.cpp" and path == "/v1/completions":
            usage = {"completion_tokens": len(self.answer(body).ids)}
            return httpx.Response(200, json={"usage": usage, "choices": [{"text": ""}]})
        return httpx.Response(404)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that agrees in part, with its texts; beside it lies what all runs share."""
    root, draw = tmp_path_factory.mktemp("engines"), random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=40))} for _ in range(200)]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    target = making.model(num_hidden_layers=2)
    making.saved(target, root / "pair" / "target")
    making.saved(making.tiny.related(target), root / "pair" / "draft")
    return root / "pair"


@pytest.fixture
def measured(tmp_path: Path, pair: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command against an engine, with more words; its summary. Its folder is `tmp_path`'s."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)

    def measure(engine: Engine, *more: str) -> dict[str, Any]:
        answer_by(monkeypatch, engine.reply)
        paths = [f"{key}.path={pair / key}" for key in ("target", "draft")]
        text = ["data=local", f"data.path={pair.parent / 'rows.jsonl'}", "data.test_fraction=0.4"]
        size = ["evaluate.prompts=24", "evaluate.max_new_tokens=32", "hardware.threads=1"]
        given = [*paths, *text, *size, "hardware.dtype=float32", "evaluate.draft=given"]
        run = [f"name={tmp_path.name}", f"engine.url={URL}"]
        return launch(MEASURE_ENGINE, smoke(pair.parent, *given, *run, *more))

    return measure


@pytest.mark.parametrize("name", ["vLLM", "SGLang", "llama.cpp"])
def test_what_an_engine_counts_is_what_is_predicted(
    tmp_path: Path, pair: Path, measured: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(name, pair)
    summary = measured(engine, "sampling.temperature=0")
    assert missing_keys("measure_engine", summary) == []
    assert (summary["engine"], summary["gamma"], summary["prompts"]) == (name, GAMMA, 24)
    assert summary["tokens_per_second"] > 0
    assert [one["drafts"] for one in summary["rows"]] == (
        ["argmax", "probabilistic"] if name == "vLLM" else ["argmax"]
    )
    row = summary["rows"][0]
    assert summary["counted"]["mean"] > 1.2
    assert not row["differs"]
    # Greedy, the texts are the same ones; what is accepted behind their ends is an average.
    assert row["difference"]["mean"] == pytest.approx(0, abs=1e-9 if name == "SGLang" else 0.1)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{name} at gamma 3, 24 prompts" in printed
    assert "counted agrees with what argmax drafts predict" in printed
    assert re.search(r"\d tokens a second, one request at a time", printed)
    assert len({json.dumps(one["prompt"]) for one in engine.requests}) == 24
    folder = pair.parent / tmp_path.name / "measure_engine"
    assert read_json(folder / SUMMARY)["engine"] == name
    assert SECRET not in "".join(f.read_text() for f in folder.glob("*.[jy]*"))


def test_sampled_drafts_are_known_from_greedy_ones(pair: Path, measured: Any) -> None:
    more = ["sampling.temperature=1", "sampling.top_k=0", "evaluate.prompts=60"]
    argmax, sampled = measured(Engine("vLLM", pair), *more)["rows"]
    assert argmax["predicted"]["mean"] < sampled["predicted"]["mean"]
    assert (argmax["differs"], sampled["differs"]) == (True, False)


@pytest.mark.parametrize(
    ("name", "changes", "key", "message"),
    [
        ("vLLM", {"drafts": False}, SECRET, "counts no speculative decoding: start it with the dr"),
        ("vLLM", {}, "another", r"has no /props of llama.cpp \(status 401\), and no /metrics"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused_before_anything_is_made(
    tmp_path: Path,
    pair: Path,
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: dict[str, Any],
    key: str,
    message: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match=rf"^engine\.url: {URL} {message}") as error:
        measured(Engine(name, pair, **changes))
    assert "\n" not in str(error.value)
    assert not (pair.parent / tmp_path.name).exists()


def test_a_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^engine\.url: name the server that runs"):
        launch(MEASURE_ENGINE, smoke(tmp_path, "engine.url=null"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vLLM", {"others": 5}, "counts other clients' tokens too: measure it alone$"),
        ("SGLang", {"others": -5}, "does not count its answers in /metrics$"),
        ("llama.cpp", {"drafts": False}, "drafts nothing: start it with the drafter$"),
    ],
)
def test_counts_that_are_not_the_answers_are_refused(
    pair: Path,
    measured: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(counters, "COUNT_SECONDS", 0.05)
    with pytest.raises(ValueError, match=message):
        measured(Engine(name, pair, **changes), "evaluate.prompts=2")
