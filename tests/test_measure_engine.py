"""What a server counts beside what is predicted, of servers that speak as the engines do.

They decode by our decoder, so what they count is what is predicted but for chance.
"""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftkit.artifacts import read_json
from draftkit.config import HardwareConfig, ModelConfig
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.engines import counters
from draftkit.models.loading import load_draft, load_target
from pipelines.measure_engine import measure_engine
from pipelines.plan import SUMMARY
from tests.engines import making
from tests.engines.counts import Answer, Counting, OurDecoder
from tests.smoke import smoke

GAMMA, SECRET = 3, "S3CRET"
WORDS = making.TEXT[0].split()


class Engine:
    """A server that decodes, and counts as `name` does; `url` while it runs."""

    def __init__(self, name: str, pair: Path, *, drafts: bool = True) -> None:
        self.name, self.drafts, self.url = name, drafts, ""
        self.counters: dict[str, float] = dict.fromkeys(("tokens", "passes", "accepted"), 0)
        self.positions, self.lag, self.others = [0] * GAMMA, 0, 0
        self.requests: list[dict[str, Any]] = []
        self.target = load_target(
            ModelConfig(path=str(pair / "target")), HardwareConfig(device="cpu", dtype="float32")
        )
        draft = load_draft(ModelConfig(path=str(pair / "draft")), self.target)
        self.decoder = OurDecoder(
            target=self.target.adapter,
            proposer=DraftModelProposer(draft),
            ends=self.target.eos_token_ids,
            gamma=GAMMA,
            counting=Counting(first_alone=True, capped=name == "llama.cpp"),
            batch_size=1,
        )

    def answer(self, request: dict[str, Any]) -> Answer:
        self.requests.append(request)
        limit = request["n_predict" if self.name == "llama.cpp" else "max_tokens"]
        (made,) = self.decoder.answers(
            [request["prompt"]],
            temperature=request["temperature"],
            limit=limit,
            seed=request["seed"],
        )
        self.counters["tokens"] += len(made.ids) + self.others
        self.counters["passes"] += made.passes
        self.counters["accepted"] += made.accepted
        for at, count in enumerate(made.by_position or []):
            self.positions[at] += count
        self.lag = 2  # readings of the counters that do not hold it
        return made

    def metrics(self) -> str:
        tag = 'engine="0",model_name="pair"'
        self.lag -= 1
        if self.lag >= 0 and self.last:
            return self.last
        values = {"vllm:generation_tokens_total": self.counters["tokens"]}
        if self.name == "SGLang":
            values = {"sglang:generation_tokens_total": self.counters["tokens"]}
            if self.drafts:
                values["sglang:spec_verify_calls_total"] = self.counters["passes"]
        elif self.drafts:
            values["vllm:spec_decode_num_drafts_total"] = self.counters["passes"]
            values["vllm:spec_decode_num_accepted_tokens_total"] = self.counters["accepted"]
        lines = []
        for name, value in values.items():
            lines += [f"# HELP {name} A number.", f"# TYPE {name} counter"]
            lines.append(f"{name}{{{tag}}} {float(value)}")
        if self.drafts and self.name == "vLLM":
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f"# TYPE {name} counter"]
            for at, value in enumerate(self.positions):
                lines.append(f'{name}{{{tag},position="{at}"}} {float(value)}')
        if self.drafts and self.name == "SGLang":
            lines += ["# TYPE sglang:spec_num_steps gauge", f"sglang:spec_num_steps {GAMMA}.0"]
        self.last = "\n".join(lines) + "\n"
        return self.last

    last = ""

    def reply(self, path: str, request: dict[str, Any]) -> Any:
        """What `path` answers; None for nothing there."""
        if self.name == "llama.cpp":
            if path == "/props":
                return {"build_info": "b1-0c1e570"}
            if path != "/completion":
                return None
            made = self.answer(request)
            # An engine counts what is proposed, not the passes, and proposes nothing past the end.
            ended = made.ids[-1] in self.target.eos_token_ids
            drafted = made.passes * GAMMA - (0 if ended else min(1, made.passes))
            counted = {"draft_n": drafted, "draft_n_accepted": made.accepted}
            timings = {"predicted_n": len(made.ids), **(counted if self.drafts else {})}
            return {"timings": timings, "stop_type": "eos" if ended else "limit"}
        if path == "/v1/models":
            return {"data": [{"id": "pair"}]}
        if path == "/v1/completions":
            return {"usage": {"completion_tokens": len(self.answer(request).ids)}}
        return None


@contextmanager
def serving(engine: Engine) -> Iterator[Engine]:
    """`engine` over HTTP, to clients that have the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            request = json.loads(self.rfile.read(length)) if length else {}
            if self.headers.get("Authorization") != f"Bearer {SECRET}":
                return self._send(401, "no key")
            if self.path == "/metrics" and engine.name != "llama.cpp":
                return self._send(200, engine.metrics())
            made = engine.reply(self.path, request)
            return self._send(404 if made is None else 200, json.dumps(made))

        do_POST = do_GET

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Into no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        engine.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair that agrees in part."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=40))} for _ in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    target = making.model(num_hidden_layers=2)
    making.saved(target, tmp_path / "pair" / "target")
    making.saved(making.tiny.related(target), tmp_path / "pair" / "draft")
    return tmp_path / "pair"


def words(pair: Path, engine: Engine, *more: str) -> list[str]:
    paths = [f"{key}.path={pair / key}" for key in ("target", "draft")]
    size = ["evaluate.prompts=24", "evaluate.max_new_tokens=24", "hardware.threads=1"]
    size += [
        "hardware.dtype=float32",
        "data=local",
        f"data.path={pair.parent / 'rows.jsonl'}",
        "data.test_fraction=0.4",
    ]
    return [*paths, "evaluate.draft=given", *size, f"engine.url={engine.url}", *more]


@pytest.mark.parametrize("name", ["vLLM", "SGLang", "llama.cpp"])
def test_what_an_engine_counts_is_what_is_predicted(
    tmp_path: Path, pair: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Engine(name, pair)) as engine:
        config = smoke(tmp_path, *words(pair, engine, "sampling.temperature=0"))
        summary = measure_engine.launch(config)
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
    if name == "vLLM":
        shares = summary["by_position"]
        assert summary["counted"]["mean"] == pytest.approx(1 + sum(shares))
        assert sorted(shares, reverse=True) == shares
    else:
        assert summary["by_position"] is None
    printed = capsys.readouterr().out
    assert f"{name} at gamma 3, 24 prompts" in printed
    assert "counted agrees with what argmax drafts predict" in printed
    assert ("not counted" in printed) == (name != "vLLM")
    assert re.search(r"\d tokens a second, one request at a time", printed)
    assert len({json.dumps(one["prompt"]) for one in engine.requests}) == 24
    record = measure_engine.path(config) / SUMMARY
    assert read_json(record)["engine"] == name
    assert SECRET not in "".join(f.read_text() for f in record.parent.glob("*.[jy]*"))


def test_sampled_drafts_are_known_from_greedy_ones(tmp_path: Path, pair: Path) -> None:
    with serving(Engine("vLLM", pair)) as engine:
        more = ["sampling.temperature=1", "sampling.top_k=0", "evaluate.prompts=60"]
        summary = measure_engine.launch(smoke(tmp_path, *words(pair, engine, *more)))
    argmax, sampled = summary["rows"]
    assert argmax["predicted"]["mean"] < sampled["predicted"]["mean"]
    assert (argmax["differs"], sampled["differs"]) == (True, False)


def test_a_server_that_cannot_be_measured_is_refused_before_anything_is_made(
    tmp_path: Path, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Engine("vLLM", pair)
    silent.url = "http://127.0.0.1:9"
    cases = [(silent, r"^engine\.url: http://127\.0\.0\.1:9 does not answer \(")]
    with serving(Engine("vLLM", pair, drafts=False)) as plain:
        cases.append((plain, r"counts no speculative decoding: start it with the drafter$"))
        for engine, message in cases:
            with pytest.raises(ValueError, match=message) as error:
                measure_engine.launch(smoke(tmp_path / "out", *words(pair, engine)))
            assert "\n" not in str(error.value)
        monkeypatch.setenv("OPENAI_API_KEY", "another")
        with pytest.raises(
            ValueError, match=r"has no /props of llama.cpp \(status 401\), and no /m"
        ):
            measure_engine.launch(smoke(tmp_path / "out", *words(pair, plain)))
    with pytest.raises(ValueError, match=r"^engine\.url: name the server that runs"):
        measure_engine.launch(smoke(tmp_path / "out", "engine.url=null"))
    assert not (tmp_path / "out" / "smoke").exists()


def test_counts_that_are_not_the_answers_are_refused(
    tmp_path: Path, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "COUNT_SECONDS", 0.05)
    for number, (name, changes, message) in enumerate(
        (
            ("vLLM", {"others": 5}, "counts other clients' tokens too: measure it alone$"),
            ("SGLang", {"others": -5}, "does not count its answers in /metrics$"),
            ("llama.cpp", {"drafts": False}, "drafts nothing: start it with the drafter$"),
        )
    ):
        with serving(Engine(name, pair)) as engine:
            vars(engine).update(changes)
            with pytest.raises(ValueError, match=message):
                measure_engine.launch(smoke(tmp_path, *words(pair, engine), f"name=run{number}"))
