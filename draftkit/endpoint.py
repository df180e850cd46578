"""The client of servers that speak OpenAI's HTTP API: vLLM, SGLang, llama.cpp, draftkit.

Requests go by the package `openai`, with OPENAI_API_KEY where that is set. No redirect is followed:
it might carry the key and the prompts elsewhere.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from json import JSONDecodeError
from typing import Any, Self, TypeVar

import httpx

from draftkit.artifacts import first_line
from draftkit.config import SamplingConfig

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
COMPLETIONS = "/v1/completions"
ASKED = "return_token_ids"  # of a request to vLLM, ...
PROMPT_IDS, IDS = "prompt_token_ids", "token_ids"  # ... and what its reply names them
OTHERWISE = (JSONDecodeError, KeyError, IndexError, TypeError, AttributeError)  # of other answers
PASSING = {408, 409, 429}  # states that may pass, beside those of 500 and more
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds before all addresses are asked again; they double

Result = TypeVar("Result")


async def _anonymous(request: httpx.Request) -> None:
    """Leave out what the client tells of this machine, and of an account at OpenAI."""
    for name in [*request.headers]:
        if name.startswith(("x-stainless-", "openai-")):
            del request.headers[name]


class Endpoint:
    """The servers at `urls`, with or without `/v1`, named by the setting `name`. They serve alike.

    retries: rounds through all addresses after the first, for a request that gets no answer, or one
    of a state that may pass. Use it as a context. Raises ValueError, one line, for what they do not
    answer.
    """

    def __init__(self, name: str, *urls: str, retries: int = 0) -> None:
        from openai import AsyncOpenAI  # takes half a second, of those alone who ask a server

        self.name, self.retries = name, retries
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.url = self.urls[0]
        self.runner = asyncio.Runner()
        self.clients = []
        for url in self.urls:
            try:
                client = AsyncOpenAI(
                    api_key=os.environ.get("OPENAI_API_KEY") or "none",  # the client wants a word
                    base_url=url,
                    max_retries=0,
                    timeout=TIMEOUT,
                    http_client=httpx.AsyncClient(
                        event_hooks={"request": [_anonymous]}, limits=httpx.Limits()
                    ),
                )
            except httpx.InvalidURL as error:
                reason = f"is no address ({first_line(error)}): correct it"
                raise self.failure(reason, url) from error
            self.clients.append(client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self.runner:
            for client in self.clients:
                self.runner.run(client.close())

    async def send(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        optional: bool = False,
        at: int = 0,
    ) -> httpx.Response:
        """The response to a POST of `body`, or to a GET; `optional`: of whatever status.

        at: number of the address that is asked first; of more than there are, the rest.
        """
        from openai import APIConnectionError, APIStatusError

        count = len(self.clients)
        for attempt in range(last := count * (self.retries + 1)):
            where = (at + attempt) % count
            client, passing = self.clients[where], attempt + 1 < last
            try:
                if body is None:
                    return await client.get(path, cast_to=httpx.Response)
                return await client.post(path, cast_to=httpx.Response, body=body)
            except APIStatusError as error:
                status, text = error.status_code, " ".join(error.response.text.split())[:200]
                if not (passing and (status >= 500 or status in PASSING)):
                    if optional:
                        return error.response
                    key = " (OPENAI_API_KEY is read for its key)" * (status in (401, 403))
                    reason = f"answers {path} by status {status}{key}: {text}"
                    raise self.failure(reason, self.urls[where]) from error
            except APIConnectionError as error:
                if not passing:
                    reason = first_line(error.__cause__ or error)
                    advice = "start it there, or correct the address"
                    reason = f"does not answer ({reason}): {advice}"
                    raise self.failure(reason, self.urls[where]) from error
            rounds, is_through = divmod(attempt + 1, count)
            if is_through == 0:
                await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (rounds - 1)))
        raise AssertionError("the last attempt returns or raises")

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        optional: bool = False,
    ) -> httpx.Response:
        """What `send` gives, for who has nothing else to do meanwhile."""
        return self.runner.run(self.send(path, body, optional=optional))

    def map(
        self, answer: Callable[[Any], Awaitable[Result]], items: Iterable[Any], *, at_once: int
    ) -> list[Result]:
        """`answer` of each item, in order, of `at_once` at a time; the first refusal is raised."""

        async def every() -> list[Result]:
            numbered = enumerate(items)
            answers: dict[int, Result] = {}

            async def one_after_another() -> None:
                for number, item in numbered:
                    answers[number] = await answer(item)

            tasks = [asyncio.ensure_future(one_after_another()) for _ in range(at_once)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            return [answers[number] for number in sorted(answers)]

        return self.runner.run(every())

    def failure(self, reason: str, url: str | None = None) -> ValueError:
        return ValueError(f"{self.name}: {url or self.url} {reason}")

    def models(self) -> list[dict[str, Any]]:
        """What the server says of its models, of one at least: `id` and `owned_by`."""
        try:
            served = self.ask("/v1/models").json()["data"]
            return [{**served[0]}, *({**one} for one in served[1:])]
        except OTHERWISE as error:
            raise self.failure("names no model at /v1/models") from error

    def ids_of(self, model: str, text: str) -> tuple[list[int] | None, list[int] | None]:
        """By which ids the server reads `text`, and those of a token that it answers; None where
        it tells none."""
        body = {"model": model, "prompt": text, "max_tokens": 1, ASKED: True}
        try:
            choice = self.ask(COMPLETIONS, body).json()["choices"][0]
            return choice.get(PROMPT_IDS), choice.get(IDS)
        except OTHERWISE as error:
            raise self.failure("answers no completion") from error

    def model(self) -> dict[str, Any]:
        """The first of its `models`."""
        return self.models()[0]


def origin_of(response: httpx.Response) -> str:
    """The address that a response came from."""
    return f"{response.url.scheme}://{response.url.netloc.decode()}"


def completion(
    prompt: Sequence[int], sampling: SamplingConfig, *, limit: int, seed: int, row: int
) -> dict[str, Any]:
    """The body of a completion of at most `limit` tokens, but for the model; rows of a run have
    seeds of their own. Every setting is named: engines and models bring defaults of their own."""
    return {
        "prompt": list(prompt),
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": (seed * 1_000_003 + row) % 2**31,
    }
