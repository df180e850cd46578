"""Traffic of a fleet at a real server of S3's protocol, written and read by processes of their own.

Run by `pytest -m engines` after `make engines`.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from draftkit.config import TargetConfig
from pipelines.product import address_of_model
from tests.engines.environments import FOLDER
from tests.engines.test_real_engines import installed
from tests.launching import ROOT, free_port
from tests.pairs import save_chat_pair
from tests.serving.fakes import wait_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PYTHON = FOLDER / "s3" / "bin" / "python"
BUCKET = "traffic"
FLEET = """
import sys
from tests.online import test_sink
test_sink.kill_writers(*sys.argv[1:])
print("killed", flush=True)
test_sink.write_until_killed(*sys.argv[1:])
"""
LITTLE = (
    *("source=fixed", "optim.max_steps=2", "data.max_length=48"),
    *("evaluate.validation_prompts=2", "evaluate.prompts=2", "evaluate.max_new_tokens=4"),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server, which keeps all in memory, with an empty bucket."""
    installed("s3")
    address = f"http://127.0.0.1:{free_port()}"
    words = [PYTHON, "-m", "moto.server", "--host", "127.0.0.1", "--port", address.split(":")[2]]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as server:
        try:
            assert wait_for(lambda: is_made(f"{address}/{BUCKET}"), 60)
            yield address
        finally:
            server.kill()


def is_made(bucket: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.put(bucket, timeout=5).is_success
    return False


def started(url: str, *words: str) -> subprocess.Popen[str]:
    """A process of the environment that has s3fs, which knows where the server is."""
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "any")
    keys |= {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    environment = os.environ | keys | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [PYTHON, *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def test_writers_that_are_killed_and_a_trainer_share_an_address(url: str, tmp_path: Path) -> None:
    """What was killed in the middle of a part is not there; what is there is whole, and data."""
    pair = save_chat_pair(tmp_path)
    target = address_of_model(TargetConfig(path=f"{tmp_path}/target"), str(tmp_path))
    address = f"s3://{BUCKET}/fleet"
    words = ("-m", "pipelines.train", *pair, f"root={tmp_path}", "data=local", *LITTLE)
    with started(url, "-c", FLEET, address, target) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "killed\n"
            with started(url, *words, f"data.path={address}") as trainer:  # beside a writer
                output = trainer.communicate(timeout=200)
            assert writer.poll() is None
        finally:
            writer.kill()
    assert trainer.returncode == 0, output
    (summary,) = tmp_path.glob("shared/texts/*/summary.json")
    read = json.loads(summary.read_text())
    assert read["rows"] >= 20 * 10
    assert read["rows"] % 10 == 0  # of a part
    assert not read.get("rows_bad")
