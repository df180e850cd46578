"""The loop around a real llama-server: traffic by the proxy, a refit, a gate, a restart by command.

The restart is the script of docs/loop.md as it stands there, with a real nginx. Run by
`pytest -m engines` after `make engines`, where nginx is installed. Five to seven minutes on two
cores.
"""

import operator
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.config import DEFAULT_ROUTE, Config, TargetConfig
from draftkit.endpoint import COMPLETIONS, Endpoint, completion
from draftkit.engines.counters import Answer, Server
from draftkit.engines.folder import write_folder
from draftkit.evaluation.intervals import estimate
from draftkit.models.files import ModelFolder
from pipelines.capture import capture
from pipelines.configuration import compose_config
from pipelines.experiments.loop_vllm import (
    CLIENTS,
    CONNECTS,
    LOT,
    LOTS,
    MAX_NEW_TOKENS,
    STAGE,
    answers_of,
    free_port,
    greedy,
    halves,
    prompts_of,
    running,
    tokens_a_pass,
)
from pipelines.online import online
from pipelines.service import registry_of
from pipelines.stage import inputs_of
from tests.engines.environments import FOLDER, say
from tests.engines.gguf import vocabulary_of, write_gguf
from tests.engines.pairs import EMBEDDED
from tests.engines.servers import CONVERT
from tests.engines.test_real_engines import installed
from tests.serving.fakes import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2400)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "loop.md"
SCRIPT = re.compile(r"^    #!/bin/sh.*?(?=^\S)", re.DOTALL | re.MULTILINE)
PORTS = ("8010", "8011")  # of the script
SERVER = FOLDER / "llamacpp" / "bin" / "llama-server"
# As in other tests of llama.cpp: float32 throughout, and one thread.
EXACT = "-c 2048 -np 4 -t 1 -fa off -ctk f32 -ctv f32"
NGINX = """
daemon on; pid nginx.pid; error_log nginx.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path temporary; proxy_temp_path temporary; fastcgi_temp_path temporary;
    uwsgi_temp_path temporary; scgi_temp_path temporary;
    upstream engine {{ include upstream.conf; }}
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engine; }} }}
}}
"""
START_SECONDS = 240.0  # in which the daemon brings the first version


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """The folder where restart.sh lies, with the programs that it calls; they end with it."""
    installed("llamacpp")
    if (nginx := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")) is None:
        pytest.skip("no nginx")
    folder, tools = tmp_path / "work", tmp_path / "work" / "bin"
    tools.mkdir(parents=True)
    (block,) = SCRIPT.findall(DOCUMENT.read_text())
    script = "".join(line.removeprefix("    ") for line in block.splitlines(keepends=True))
    tokenizer = ModelFolder(TargetConfig(path=str(EMBEDDED))).tokenizer
    splitter = vocabulary_of(tokenizer, rows=len(tokenizer)).splitter
    converter, (core, *_) = FOLDER / "llamacpp", halves(sorted(os.sched_getaffinity(0)))[0]
    (folder / "convert.py").write_text(CONVERT.replace('"convert_hf', f'"{converter}/convert_hf'))
    programs = {
        folder / "restart.sh": script,
        tools / "python": f"#!/bin/sh\nshift; export PYTHONPATH={converter}\n"
        f'exec {converter}/bin/python convert.py {splitter} "$@"\n',
        tools / "llama-server": f'#!/bin/sh\nexec taskset -c {core} {SERVER} {EXACT} "$@"\n',
        tools / "nginx": f'#!/bin/sh\nexec {nginx} -p $PWD/ -c nginx.conf "$@"\n',
    }
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    (folder / "upstream.conf").write_text(f"server 127.0.0.1:{PORTS[0]};\n")
    write_gguf(TargetConfig(path=str(EMBEDDED)), folder / "target.gguf", kind="f32", key="target")
    yield folder
    for name in (*(f"{port}.pid" for port in PORTS), "nginx.pid"):
        if (folder / name).is_file():
            subprocess.run(["kill", (folder / name).read_text().strip()], check=False)


@contextmanager
def plain(work: Path) -> Iterator[str]:
    """The address of a llama-server without a drafter."""
    port = free_port()
    words = [str(work / "bin" / "llama-server"), "-m", "target.gguf", "--port", str(port)]
    with (work / "plain.log").open("w") as log:
        process = subprocess.Popen(words, cwd=work, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        with Endpoint("engine", url, retries=CONNECTS) as server:
            server.ask("/health")
        yield url
    finally:
        process.kill()
        process.wait()


def sent(proxy: str, config: Config, lot: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Send a lot through the proxy; proposals that were accepted, and passes, by the replies.

    Raises ValueError where a request fails: none is sent again.
    """
    with Endpoint("proxy", proxy, retries=CONNECTS) as starting:
        model = starting.model()["id"]
    with Endpoint("proxy", proxy) as server:

        async def ask(prompt: Sequence[int]) -> tuple[int, int]:
            body = completion(prompt, greedy(config), limit=MAX_NEW_TOKENS, seed=0, row=0)
            timings = (await server.send(COMPLETIONS, {**body, "model": model})).json()["timings"]
            accepted = timings.get("draft_n_accepted", 0)
            return accepted, timings["predicted_n"] - 1 - accepted

        counts = [*server.map(ask, lot, at_once=CLIENTS)]
    return sum(one for one, _ in counts), sum(one for _, one in counts)


def counted(url: str, config: Config, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    with Endpoint("engine", url, retries=CONNECTS) as endpoint:
        server = Server(endpoint)
        return server.answers(prompts, sampling=greedy(config), limit=MAX_NEW_TOKENS, seed=0)


def test_a_drafter_follows_the_traffic_behind_llama_server(work: Path, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (work / "nginx.conf").write_text(NGINX.format(port=port))
    subprocess.run([work / "bin" / "nginx"], cwd=work, check=True)
    config = compose_config(
        ["+experiment=loop_vllm", f"root={tmp_path}", "tracker=none", f"engine.url={url}"]
    )
    command = f"cd {work} && PATH={work / 'bin'}:$PATH ./restart.sh > restart.log 2>&1"
    made = inputs_of(STAGE, config)
    draft, target = (made.model(config, key) for key in ("draft", "target"))
    write_folder(draft, target, work / "first", gamma=config.proposals, untied=True)
    first = os.environ | {"DRAFTKIT_DRAFT": str(work / "first")}
    subprocess.run(command, shell=True, env=first, check=True)
    config = replace(
        config,
        online=replace(config.online, push="command", command=command),
        capture=replace(config.capture, port=free_port()),
    )
    own_cores, all_cores = halves(sorted(os.sched_getaffinity(0)))[1], os.sched_getaffinity(0)
    requests, held_out = prompts_of(made.inputs["asked"])
    with plain(work) as alone:
        expected = answers_of(alone, held_out)
    os.sched_setaffinity(0, own_cores)
    try:
        with running(capture, config), running(online, config) as daemon:
            registry = registry_of(config, DEFAULT_ROUTE)
            assert wait_for(lambda: registry.served() is not None, seconds=START_SECONDS)
            before = counted(url, config, held_out)
            proxy = f"http://127.0.0.1:{config.capture.port}"
            for first in range(0, len(requests), LOT):
                lot = [prompt for _, prompt in requests[first : first + LOT]]
                accepted, passes = sent(proxy, config, lot)
                say(
                    f"{first + LOT} of {len(requests)} requests, {requests[first][0]}: "
                    f"{1 + accepted / passes:.2f} tokens a pass, {registry.served()} serves"
                )
            alive = daemon.is_alive()
        after, answers = counted(url, config, held_out), answers_of(url, held_out)
    finally:
        os.sched_setaffinity(0, all_cores)
    gain = estimate(tokens_a_pass(after), tokens_a_pass(before), compare=operator.sub)
    same = sum(one == text for one, text in zip(answers, expected, strict=True))
    say(
        f"held-out prompts: {estimate(tokens_a_pass(before)).mean:.2f} tokens a pass before, "
        f"{estimate(tokens_a_pass(after)).mean:.2f} after, gain {gain.mean:+.2f} {gain.ci95}; "
        f"{same} of {len(answers)} answers are those of llama-server without a drafter"
    )
    assert alive
    assert len(requests) == LOT * sum(LOTS.values())
    assert registry.served() not in (None, "v000001")
    assert gain.ci95 is not None
    assert gain.ci95[0] > 0
    assert same == len(answers)
