"""The command that serves: a process of its own, its folder, its end."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.artifacts import locked
from draftkit.config import SamplingConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.models.loading import load_target
from draftkit.online.registry import Registry
from draftkit.serving.server import listen
from pipelines.configuration import compose_config
from pipelines.serve import KEY_VARIABLE, api_key, serve, url_of
from pipelines.service import service_folder
from tests.launching import Forked
from tests.online.traffic import stored
from tests.pairs import save_chat_pair
from tests.services import buffer_of
from tests.serving.fakes import ask, completion, wait_for


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pair on disk, as the overrides that name it."""
    return save_chat_pair(tmp_path_factory.mktemp("pair"))


def overrides(pair: list[str], root: Path, *more: str) -> list[str]:
    fixed = ["serve.port=0", "hardware.device=cpu", "hardware.threads=1", "decode.compile='false'"]
    return [*pair, f"root={root}", "name=served", "serve.adapts=false", *fixed, *more]


def address_of(process: Forked) -> str:
    """Host and port, once the command has told that it serves."""
    line = next((line for line in process.stdout if " answers at " in line), "")
    return line.rpartition("http://")[2].removesuffix("/v1\n")


def test_a_server_from_start_to_end(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serves, records, drains on SIGTERM, and begins again with what its folder holds."""
    arguments = overrides(pair, tmp_path, "serve.model_name=mine", "online.routes=[default,code]")
    folder = tmp_path / "served" / "service"
    with monkeypatch.context() as patch:
        patch.setenv(KEY_VARIABLE, "secret")
        process = Forked("pipelines.serve", *arguments)
    with process:
        address = address_of(process)
        key = {"authorization": "Bearer secret"}
        assert ask(address, "/v1/models").status == 401
        assert ask(address, "/v1/models", headers=key).json["data"][0]["id"] == "mine"
        body = completion(model="mine", max_tokens=5, temperature=0)  # sampled text may end early
        made = ask(address, "/v1/completions", body, key).json
        assert made["speculative"]["drafter_version"] == "v000001"
        chat = {"model": "mine", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        code = {**key, "x-draftkit-route": "code"}
        assert ask(address, "/v1/chat/completions", chat, code).status == 200
        for route in ("default", "code"):
            found = Registry(folder / "drafters", route).current()
            assert found is not None
            assert found.name == "v000001"
        long = completion(model="mine", max_tokens=900, prompt="a" * 5, temperature=0)
        assert ask(address, "/v1/completions", long, key).status == 400  # the model holds 128
        long["max_tokens"] = 100
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(ask, address, "/v1/completions", long, key)
            wait_for(
                lambda: (
                    b'running{model_name="mine"} 1' in ask(address, "/metrics", headers=key).body
                ),
                2,
            )
            process.send_signal(signal.SIGTERM)
            assert last.result().status == 200
        assert (process.wait(), process.stdout.read()) == (0, "")
    config = compose_config(arguments)
    buffer = buffer_of(config)
    assert sorted(len(one.output_ids) for one in stored(buffer)) == [5, 100]
    buffer.close()
    with Forked("pipelines.serve", *arguments) as again:
        address = address_of(again)
        assert ask(address, "/health").status == 200
        assert len(Registry(folder / "drafters", "default").versions()) == 1
        again.send_signal(signal.SIGINT)
        assert again.wait() == 0


def test_a_server_without_a_drafter_answers_as_the_target_does(
    pair: list[str], tmp_path: Path
) -> None:
    """It says that there is nothing to follow, and leaves no registry behind."""
    arguments = overrides(pair, tmp_path, "decode.proposer=prompt_lookup")
    config = compose_config(arguments)
    target = load_target(config.target, config.hardware)
    prompt = target.tokenizer("abcabcabcab")["input_ids"]
    greedy = SamplingConfig(temperature=0.0)
    (expected,) = decode(
        target.adapter,
        [*make_requests([prompt], max_new_tokens=30, sampling=greedy)],
        eos_token_ids=target.eos_token_ids,
        batch_size=1,
    )
    with Forked("pipelines.serve", *arguments) as process:
        assert "no published version is followed" in process.stdout.readline()
        address = address_of(process)
        body = completion(model="target", prompt=prompt, max_tokens=30, temperature=0)
        made = ask(address, "/v1/completions", body).json
        assert made["choices"][0]["text"] == target.tokenizer.decode(expected.output_ids)
        assert made["speculative"]["drafter_version"] == "prompt_lookup"
        assert made["speculative"]["drafted"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert not (service_folder(config) / "drafters").exists()


@pytest.mark.parametrize(
    ("setting", "environment", "words"),
    [
        ("serve.port={taken}", {}, r"serve\.port=.* \(Address already in use\)"),
        ("serve.host=0.0.0.0", {}, r"serve\.host=0\.0\.0\.0 is open to other machines.*set DRAFT"),
        ("serve.port=0", {KEY_VARIABLE: " "}, "DRAFTKIT_API_KEY is empty"),
    ],
)
def test_what_cannot_be_served_ends_before_a_model_is_loaded_or_a_folder_made(
    pair: list[str],
    tmp_path: Path,
    setting: str,
    environment: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with listen("127.0.0.1", 0) as taken:
        setting = setting.format(taken=taken.getsockname()[1])
        with pytest.raises(ValueError, match=rf"^.*{words}.*$"):
            serve(compose_config(overrides(pair, tmp_path, setting)))
    assert not (tmp_path / "served").exists()


def test_a_second_server_of_a_service_is_refused(pair: list[str], tmp_path: Path) -> None:
    """Whatever its port; a server that has ended, or was killed, holds nothing."""
    config = compose_config(overrides(pair, tmp_path))
    with (
        locked(service_folder(config) / "server"),
        pytest.raises(ValueError, match="server is in use by another run"),
    ):
        serve(config)
    with pytest.raises(ValueError, match="cannot be swept"):
        serve(replace(config, job="swept"))


def test_the_key_and_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "word ")
    assert api_key() == "word"
    monkeypatch.delenv(KEY_VARIABLE)
    assert api_key() is None
    assert url_of(("127.0.0.1", 80)) == "http://127.0.0.1:80"
    assert url_of(("::1", 80, 0, 0)) == "http://[::1]:80"
