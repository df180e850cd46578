"""Where a server answers that speaks OpenAI's HTTP API: vLLM, SGLang, llama.cpp, draftkit."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from json import JSONDecodeError
from typing import Any

import httpx

from draftkit.artifacts import first_line
from draftkit.config import SamplingConfig
from draftkit.evaluation.certificate import Answer

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
LIKELIEST = 2  # tokens whose log-probabilities are wanted
OTHERWISE = (JSONDecodeError, KeyError, IndexError, TypeError)  # of what is no such answer


class Endpoint:
    """The server at `url`, named by the setting `name`. Raises ValueError, one line, for what it
    does not answer."""

    def __init__(self, name: str, url: str, *, key: str = "") -> None:
        self.name, self.url = name, url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(headers=headers, timeout=TIMEOUT)

    def ask(self, method: str, path: str, *, optional: bool = False, **body: Any) -> httpx.Response:
        """A response; `optional`: of whatever status."""
        try:
            response = self.client.request(method, f"{self.url}{path}", **body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.failure(f"does not answer ({first_line(error)})") from error
        if not (response.is_success or optional):
            text = " ".join(response.text.split())[:200]
            raise self.failure(f"answers {path} by status {response.status_code}: {text}")
        return response

    def failure(self, reason: str) -> ValueError:
        return ValueError(f"{self.name}: {self.url} {reason}")

    def model(self) -> dict[str, Any]:
        """What the server says of its model: `id` and `owned_by`."""
        try:
            return dict(self.ask("GET", "/v1/models").json()["data"][0])
        except OTHERWISE as error:
            raise self.failure("names no model at /v1/models") from error

    def answers(
        self, bodies: Sequence[dict[str, Any]], sampling: SamplingConfig, *, at_once: int
    ) -> list[Answer]:
        """An answer to each body of a completion (`prompt`, `max_tokens`), `at_once` at a time."""
        model = self.model()
        common = {"model": model["id"], **vars(sampling), "top_k": sampling.top_k or -1}
        common["logprobs"] = LIKELIEST
        if model.get("owned_by") == "llamacpp":
            common |= {"n_probs": LIKELIEST, "repeat_penalty": sampling.repetition_penalty}
        with ThreadPoolExecutor(at_once) as pool:
            return [*pool.map(lambda body: self._answer({**common, **body}), bodies)]

    def _answer(self, body: dict[str, Any]) -> Answer:
        try:
            scores = self.ask("POST", "/v1/completions", json=body).json()["choices"][0]["logprobs"]
            if "content" not in scores:
                return Answer(scores["tokens"], scores["top_logprobs"])
            tokens = scores["content"]  # llama.cpp scores completions as others score chats
            tops = [{one["token"]: one["logprob"] for one in t["top_logprobs"]} for t in tokens]
            return Answer([token["token"] for token in tokens], tops)
        except OTHERWISE as error:
            raise self.failure("returns no log-probabilities of its tokens") from error
