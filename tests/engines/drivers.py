"""Engines as they are run: started on an exported pair, sent prompts, read for their own counts.

vLLM and llama.cpp run as servers, and are counted by what they report over HTTP; transformers and
ONNX Runtime GenAI run in a program of ours (`workers`) in their own environment. What is started
here listens on this machine only, sends no usage statistics, and ends with its `Session`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

from draftkit.artifacts import read_json
from draftkit.evaluation.cards import llamacpp_options, vllm_options
from tests.engines.counts import Answer, Counting, answer_of

HOST = "127.0.0.1"
START_SECONDS = 600.0  # an engine may compile before it answers
COUNT_SECONDS = 20.0  # within which a server's counters follow its answer
TIMEOUT = httpx.Timeout(600.0, connect=10.0)
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started, and how.

    folder: of the exported pair. drafts: `sampled`, `argmax`, or None for no drafter. length: the
    most tokens of a prompt with its answer. log: where the engine's own lines go.
    """

    folder: Path
    target: str
    gamma: int
    length: int
    environment: Path
    log: Path
    drafts: str | None = None
    threads: int | None = None
    plugin: str | None = None


class Session(Protocol):
    """A running engine."""

    version: str

    def answers(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, limit: int, seed: int
    ) -> list[Answer]:
        """Continue each prompt by at most `limit` tokens, one after the other."""
        ...


@dataclass(frozen=True, kw_only=True)
class Driver:
    """An engine: how it is called, drafts, counts and starts.

    drafts: the ways to draft that it can be started with, its default first. program: what its
    environment must have.
    """

    title: str
    drafts: Sequence[str]
    counting: Counting
    program: str
    start: Callable[[Launch], contextlib.AbstractContextManager[Session]]

    def program_in(self, environment: Path) -> Path:
        return environment / "bin" / self.program


def environment_of(name: str) -> Path:
    """The environment that has the engine. Raises ValueError where its program is not there."""
    environment = Path(sys.prefix) if name == "transformers" else Path(".engines") / name
    if not DRIVERS[name].program_in(environment).exists():
        raise ValueError(f"there is no {DRIVERS[name].program_in(environment)}: `make engines`")
    return environment.absolute()


def environment_variables(launch: Launch) -> dict[str, str]:
    """Those of this process, with the threads that are wanted, and without usage statistics."""
    variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_PLUGINS": launch.plugin or ""}
    variables.pop("PYTHONPATH", None)
    if launch.threads is not None:
        variables["OMP_NUM_THREADS"] = str(launch.threads)
    variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return variables


def _failed(launch: Launch, reason: str) -> ValueError:
    return ValueError(f"engine: {reason}; what it wrote: {launch.log}")


@contextmanager
def running(
    launch: Launch, command: Sequence[str], *, piped: bool = False
) -> Iterator[subprocess.Popen]:
    """A process with all that it starts, which end with the block; `piped`: spoken to in lines."""
    with launch.log.open("a") as log:
        process = subprocess.Popen(
            [*command],
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
            text=True,
            env=environment_variables(launch),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for sign, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


# Programs of ours in the engine's environment


@dataclass
class Worker:
    """A program of `workers`, which answers lines of JSON by lines of JSON."""

    launch: Launch
    process: subprocess.Popen
    version: str = ""

    def read(self) -> dict[str, Any]:
        """Its next line. Raises ValueError where it has ended."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise _failed(self.launch, f"it ended with status {self.process.wait()}")
        return json.loads(line)

    def answers(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, limit: int, seed: int
    ) -> list[Answer]:
        """As in `Session`."""
        request = {"prompts": [list(prompt) for prompt in prompts], "temperature": temperature}
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read` says why
            print(json.dumps(request | {"limit": limit, "seed": seed}), file=self.process.stdin)
            self.process.stdin.flush()
        answers = []
        for _ in prompts:
            made = self.read()
            if "counts" in made:  # what each pass accepted
                counts, ids = made.pop("counts"), made.pop("ids")
                made |= vars(answer_of(counts, ids, self.launch.gamma)) | made
            answers.append(Answer(**made))
        return answers


@contextmanager
def worker(launch: Launch, file: str, setting: Mapping[str, Any]) -> Iterator[Worker]:
    python = str(launch.environment / "bin" / "python")
    command = [python, str(WORKERS / file), json.dumps(setting)]
    with running(launch, command, piped=True) as process:
        session = Worker(launch, process)
        session.version = session.read()["version"]
        yield session


def transformers(launch: Launch) -> contextlib.AbstractContextManager[Session]:
    """`generate` with the exported folder as the assistant, as its generation_config says."""
    setting = {
        "target": launch.target,
        "draft": str(launch.folder / "hf") if launch.drafts else "",
        "dtype": "float32",
    }
    return worker(launch, "run_transformers.py", setting)


def onnx(launch: Launch) -> contextlib.AbstractContextManager[Session]:
    """The exported pair; without a drafter, its target alone."""
    folder = launch.folder / "onnx"
    target = folder if launch.drafts else folder / "target"
    setting = {"target": str(target), "draft": bool(launch.drafts), "gamma": launch.gamma}
    return worker(launch, "run_onnx.py", setting)


# Servers


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


@dataclass
class Server(ABC):
    """An HTTP server, with what both kinds share."""

    launch: Launch
    url: str
    process: subprocess.Popen
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=TIMEOUT))
    version: str = ""

    def request(self, method: str, path: str, **body: Any) -> httpx.Response:
        """A successful response. Raises ValueError naming the server otherwise."""
        try:
            response = self.client.request(method, f"{self.url}{path}", **body)
        except httpx.HTTPError as error:
            reason = f"{self.url} does not answer ({type(error).__name__}: {error})"
            raise _failed(self.launch, reason) from error
        if not response.is_success:
            text = " ".join(response.text.split())[:200]
            raise _failed(self.launch, f"{self.url}{path}: status {response.status_code}, {text}")
        return response

    def close(self) -> None:
        self.client.close()

    def wait(self) -> None:
        """Until it answers. Raises ValueError where it ends before, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise _failed(self.launch, f"it ended with status {self.process.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.2)
        raise _failed(self.launch, f"{self.url} does not answer")

    def answers(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, limit: int, seed: int
    ) -> list[Answer]:
        """As in `Session`."""
        return [
            self.answer(
                list(prompt),
                temperature=temperature,
                limit=limit,
                seed=(seed * 1_000_003 + row) % 2**31,
            )
            for row, prompt in enumerate(prompts)
        ]

    @abstractmethod
    def answer(self, prompt: list[int], *, temperature: float, limit: int, seed: int) -> Answer:
        """Continue one prompt, counted."""


@contextmanager
def serving(
    launch: Launch, make: type[Server], command: Callable[[int], list[str]]
) -> Iterator[Server]:
    """The server that `command(port)` starts."""
    port = free_port()
    with (
        running(launch, command(port)) as process,
        closing(make(launch, f"http://{HOST}:{port}", process)) as server,
    ):
        server.wait()
        yield server


class VllmServer(Server):
    """vLLM's counters are read before and after each answer, so it may have no other client."""

    PREFIX = "vllm:spec_decode_num_"
    TOKENS = "vllm:generation_tokens_total"

    def wait(self) -> None:
        super().wait()
        self.version = self.request("GET", "/version").json()["version"]
        self.model = self.request("GET", "/v1/models").json()["data"][0]["id"]

    def counters(self) -> dict[str, float]:
        """Its counters by name, those of positions by name and position."""
        counters: dict[str, float] = {}
        for family in text_string_to_metric_families(self.request("GET", "/metrics").text):
            for sample in family.samples:
                if sample.name.startswith(self.PREFIX) or sample.name == self.TOKENS:
                    key = sample.name + sample.labels.get("position", "")
                    counters[key] = counters.get(key, 0.0) + sample.value
        return counters

    def counters_after(self, before: Mapping[str, float], tokens: int) -> dict[str, float]:
        """The counters once they hold an answer of `tokens`, which they may do a moment later."""
        deadline = time.monotonic() + COUNT_SECONDS
        while time.monotonic() < deadline:
            now = self.counters()
            if now.get(self.TOKENS, 0) - before.get(self.TOKENS, 0) >= tokens:
                return now
            time.sleep(0.01)
        raise _failed(self.launch, f"{self.url}/metrics does not count the answers")

    def answer(self, prompt: list[int], *, temperature: float, limit: int, seed: int) -> Answer:
        before = self.counters()
        request = {
            **{"model": self.model, "prompt": prompt, "max_tokens": limit, "seed": seed},
            **{"temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
            **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            "return_token_ids": True,
        }
        started = time.perf_counter()
        choice = self.request("POST", "/v1/completions", json=request).json()["choices"][0]
        seconds = time.perf_counter() - started
        ids = choice["token_ids"]
        after = self.counters_after(before, len(ids))

        def gained(name: str) -> int:
            key = self.PREFIX + name
            return int(after.get(key, 0) - before.get(key, 0))

        positions = [
            gained(f"accepted_tokens_per_pos_total{position}")
            for position in range(self.launch.gamma)
        ]
        return Answer(
            ids=ids,
            seconds=seconds,
            passes=gained("drafts_total"),
            accepted=gained("accepted_tokens_total"),
            by_position=positions,
        )


def vllm(launch: Launch) -> contextlib.AbstractContextManager[Session]:
    """`vllm serve` with the options that `export` writes."""

    def command(port: int) -> list[str]:
        # As `vllm serve`, whose program asks for a package of that very name: vllm-cpu has another.
        words = [
            str(launch.environment / "bin" / "python"),
            "-m",
            "vllm.entrypoints.openai.api_server",
        ]
        words += ["--model", launch.target]
        words += ["--host", HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        words += ["--max-model-len", str(launch.length), "--max-num-seqs", "1"]
        if launch.drafts is not None:
            drafter = launch.folder / "hf"
            parallel = "pard_token" in read_json(drafter / "config.json")
            options = vllm_options(str(drafter), launch.gamma, parallel=parallel)
            if launch.drafts == "argmax":
                del options["draft_sample_method"]  # its default
            words += ["--speculative-config", json.dumps(options)]
        return words

    return serving(launch, VllmServer, command)


class LlamaServer(Server):
    """llama-server reports with each answer how many tokens were drafted, and how many accepted."""

    def wait(self) -> None:
        super().wait()
        self.version = str(self.request("GET", "/props").json().get("build_info", ""))

    def answer(self, prompt: list[int], *, temperature: float, limit: int, seed: int) -> Answer:
        request = {
            **{"prompt": prompt, "n_predict": limit, "seed": seed, "cache_prompt": False},
            **{"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            **{"typical_p": 1.0, "repeat_penalty": 1.0, "samplers": ["temperature"]},
            "return_tokens": True,
        }
        started = time.perf_counter()
        made = self.request("POST", "/completion", json=request).json()
        seconds = time.perf_counter() - started
        ids, counted = made["tokens"], made["timings"]
        accepted, drafted = counted.get("draft_n_accepted", 0), counted.get("draft_n", 0)
        passes = 0
        if drafted:
            # Each token that was no accepted proposal is of a pass of its own, the first one of
            # the prompt's. An end of text cuts what the last pass accepted.
            whole = made.get("stop_type") == "limit"
            passes = len(ids) - 1 - accepted if whole else drafted // self.launch.gamma
        return Answer(ids=ids, seconds=seconds, passes=passes, accepted=accepted)


def _only(folder: Path, name: str) -> str:
    """The one GGUF of a model that was exported for a measurement."""
    (file,) = folder.glob(f"{name}-*.gguf")
    return str(file)


def llamacpp(launch: Launch) -> contextlib.AbstractContextManager[Session]:
    """llama-server with the options that `export` writes; all in float32."""
    folder = launch.folder / "llamacpp"

    def command(port: int) -> list[str]:
        server, target = launch.environment / "bin" / "llama-server", _only(folder, "target")
        words = [str(server), "-m", target]
        words += ["--host", HOST, "--port", str(port), "-c", str(launch.length), "-np", "1"]
        # Flash attention rounds to half precision.
        caches = ("-ctk", "-ctv", *(("-ctkd", "-ctvd") if launch.drafts else ()))
        words += ["-fa", "off", *(word for key in caches for word in (key, "f32"))]
        if launch.threads is not None:
            words += ["-t", str(launch.threads)]
        if launch.drafts is not None:
            words += ["-md", _only(folder, "draft")]
            words += llamacpp_options(launch.gamma)
        return words

    return serving(launch, LlamaServer, command)


DRIVERS: dict[str, Driver] = {
    "transformers": Driver(
        title="transformers",
        drafts=("sampled",),
        counting=Counting(first_alone=False, capped=True),
        program="python",
        start=transformers,
    ),
    "vllm": Driver(
        title="vLLM",
        drafts=("argmax", "sampled"),
        counting=Counting(first_alone=True, capped=False),
        program="vllm",
        start=vllm,
    ),
    "onnx": Driver(
        title="ONNX Runtime GenAI",
        drafts=("sampled",),
        counting=Counting(first_alone=False, capped=True),
        program="python",
        start=onnx,
    ),
    "llamacpp": Driver(
        title="llama.cpp",
        drafts=("argmax",),
        counting=Counting(first_alone=True, capped=True),
        program="llama-server",
        start=llamacpp,
    ),
}
