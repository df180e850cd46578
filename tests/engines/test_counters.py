"""What servers say of their own speculation, as real ones have printed it (`recorded`)."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from draftkit.artifacts import read_json
from draftkit.config import SamplingConfig
from draftkit.endpoint import Endpoint
from draftkit.engines import counters
from tests.replies import answer_by

RECORDED = Path(__file__).parent / "recorded"


def test_answers_as_the_engines_print_them_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what vLLM 0.32 and llama.cpp 0.5 answered to two prompts on the embedded pair."""

    def replies_of(name: str) -> Callable[[httpx.Request], httpx.Response]:
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
        return reply

    for name, prompts, expected in (
        ("vllm", [[1, 2]], [(8, 4, 3)]),
        ("llamacpp", [[1, 2], [3, 4, 5]], [(8, 4, 3), (8, 4, 3)]),
    ):
        answer_by(monkeypatch, replies_of(name))
        with Endpoint("engine.url", "http://engine/v1") as endpoint:
            server = counters.Server(endpoint)
            greedy = SamplingConfig(temperature=0.0)
            answers = server.answers(prompts, sampling=greedy, limit=8, seed=1)
        counted = [(a.tokens, a.passes, a.accepted) for a in answers]
        assert counted == expected
        assert server.gamma == 4 or name == "llamacpp"  # whose answers are too short to show it
