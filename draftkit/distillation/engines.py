"""A `Sampler` that asks an engine which speaks OpenAI's HTTP API and token ids: vLLM, SGLang.

Prompts travel as token ids to `/completions`, and answers come back as ids (`return_token_ids`). An
engine that returns text alone is refused: tokenised again it may be other tokens than were sampled.
What the engine serves is its own affair: this module knows no models, and no key but the one that
it is given.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftkit.config import Config, TargetConfig
from draftkit.data.lengths import Room
from draftkit.decoding.state import Request
from draftkit.distillation.samplers import ROLLOUTS, Sampler, noise_seed
from draftkit.models.loading import load_outline

TRIES = 6
FIRST_WAIT = 1.0  # seconds, doubled from try to try
TIMEOUT = httpx.Timeout(600.0, connect=10.0)
PASSES = {408, 409, 425, 429, 500, 502, 503, 504}  # states of a server that may pass


@dataclass(frozen=True, kw_only=True)
class OpenAISampler(Sampler):
    """Asks the engine at `url` for answers of `model`, `batch_size` at a time."""

    url: str  # as http://127.0.0.1:8000/v1
    model: str
    name: str = "openai"
    key: str = field(default="", repr=False)
    wait: Callable[[float], None] = time.sleep

    def answers(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """As in `Sampler`; here the seed of a row is the engine's to interpret.

        Raises ValueError, one line, where the engine does not answer or not to what was asked.
        """
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        pool = ThreadPoolExecutor(self.batch_size)
        with httpx.Client(headers=headers, timeout=TIMEOUT) as client:
            try:
                tasks = [pool.submit(self._answer, client, request) for request in requests]
                return [{"output_ids": task.result()} for task in tasks]
            finally:
                pool.shutdown(cancel_futures=True)

    def _answer(self, client: httpx.Client, request: Request) -> list[int]:
        """The answer to `request`, to its first end or the limit."""
        answer, ends = self._ask(client, self._body(request)), self.eos_token_ids
        try:
            choice = answer["choices"][0]
            if choice.get("prompt_token_ids") not in (None, list(request.prompt_ids)):
                raise self._failure("it changes prompts: they do not come back as they were sent")
            if choice.get("token_ids") is None and choice["text"] is not None:
                raise self._failure(
                    "it returns text without token ids, of which nobody knows what was sampled: "
                    "use an engine that returns ids (vLLM, SGLang)"
                )
            output = list(choice["token_ids"])
            if choice.get("finish_reason") == "stop":
                output += self._end_of(choice)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._failure(f"its answer is not a completion ({error!r})") from error
        end = next((n for n, token in enumerate(output, start=1) if token in ends), None)
        return output[:end][: request.max_new_tokens]

    def _body(self, request: Request) -> dict[str, Any]:
        """Every setting is named: engines and models bring defaults of their own."""
        sampling = request.sampling
        return {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": (request.seed * 1_000_003 + request.row) % 2**31,
            "return_token_ids": True,
        }

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> Any:
        """The engine's answer, after as many tries as it takes, TRIES at most."""
        reason = ""
        for attempt in range(TRIES):
            if attempt > 0:
                self.wait(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                response = client.post(f"{self.url.rstrip('/')}/completions", json=body)
                if response.is_success:
                    return response.json()
            except httpx.RequestError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            except (httpx.InvalidURL, ValueError) as error:
                raise self._failure(f"its answer is not JSON, or no one's: {error}") from error
            reason = f"status {response.status_code}, {response.text.strip()[:200]!r}"
            if response.status_code not in PASSES:
                raise self._failure(reason)
        raise self._failure(f"{reason}, {TRIES} times")

    def _end_of(self, choice: dict[str, Any]) -> list[int]:
        """The end of text of an answer that came to it, for an engine that leaves it out.

        Which one of several it was vLLM says as `stop_reason` and SGLang as `matched_stop`. Where
        nobody says, the answer goes without rather than with an end that was not sampled.
        """
        ends = self.eos_token_ids
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        return [stop] if stop in ends else list(ends) if len(ends) == 1 else []

    def _failure(self, reason: str) -> ValueError:
        return ValueError(f"generate.url {self.url}: {' '.join(reason.split())}")


def engine_sampler(target: TargetConfig, config: Config, room: Room) -> OpenAISampler:
    """The target, as the engine at `generate.url` serves it; its weights are not loaded here."""
    options = config.generate
    assert options.url is not None
    assert target.path is not None
    return OpenAISampler(
        url=options.url,
        model=options.model or target.path,
        key=os.environ.get("OPENAI_API_KEY", ""),
        sampling=config.sampling,
        eos_token_ids=load_outline(target, config.hardware).eos_token_ids,
        max_new_tokens=room.new,
        max_length=room.total,
        batch_size=options.batch_size,
        seed=noise_seed(config.seed, ROLLOUTS),
    )
