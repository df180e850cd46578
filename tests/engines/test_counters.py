"""What servers say of their own speculation, as real ones have printed it (`recorded`)."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from draftkit.artifacts import read_json
from draftkit.config import SamplingConfig
from draftkit.engines import counters, endpoint

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[bad"])
def test_a_server_that_does_not_answer_is_named_in_one_line(url: str) -> None:
    with pytest.raises(ValueError, match=r"^engine\.url: .* does not answer \(") as error:
        counters.Server(url)
    assert "\n" not in str(error.value)


def test_answers_as_the_engines_print_them_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what vLLM 0.32 and llama.cpp 0.5 answered to two prompts on the embedded pair."""

    def client(name: str) -> Any:
        replies = read_json(RECORDED / f"{name}.json")
        waiting = {one["path"]: [] for one in replies}
        for one in replies:
            waiting[one["path"]].append(one["text"])

        def reply(request: httpx.Request) -> httpx.Response:
            texts = waiting.get(request.url.path)
            if not texts:
                return httpx.Response(404)
            return httpx.Response(200, text=texts.pop(0) if len(texts) > 1 else texts[0])

        # The server's own look at its counters takes none of the readings.
        if "/metrics" in waiting:
            waiting["/metrics"].insert(0, waiting["/metrics"][0])
        return httpx.Client(transport=httpx.MockTransport(reply))

    for name, prompts, expected in (
        ("vllm", [[1, 2]], [(8, 4, 3)]),
        ("llamacpp", [[1, 2], [3, 4, 5]], [(8, 4, 3), (8, 4, 3)]),
    ):
        made = client(name)
        monkeypatch.setattr(endpoint.httpx, "Client", lambda made=made, **_: made)
        server = counters.Server("http://engine/v1")
        answers = server.answers(prompts, sampling=SamplingConfig(temperature=0.0), limit=8, seed=1)
        counted = [(a.tokens, a.passes, a.accepted) for a in answers]
        assert counted == expected
        assert server.gamma == 4 or name == "llamacpp"  # whose answers are too short to show it
        monkeypatch.undo()
