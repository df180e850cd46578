"""The OpenAI API over an engine: `/v1/completions`, `/v1/chat/completions`, models, metrics.

Here requests become jobs and pieces become answers, whole or as server-sent events; a client that
leaves frees its rows. Every error is told in OpenAI's form with one line of reason. This module
decodes nothing and knows no tokenizer's inside: see `engine`, `intake`, `protocol`, `replies`.
"""

import asyncio
import math
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftkit.config import SamplingConfig, ServeConfig
from draftkit.serving.delivery import EventStream, Reader, WholeAnswer, failure_of
from draftkit.serving.engine import Engine
from draftkit.serving.intake import Asked, Intake, UnknownModel
from draftkit.serving.jobs import Draining, QueueFull
from draftkit.serving.limits import Limits
from draftkit.serving.metrics import CONTENT_TYPE, Metrics
from draftkit.serving.protocol import (
    SHOWN,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    explain,
)
from draftkit.serving.replies import Failed, json_response
from draftkit.serving.streams import Answers, ClientLeft, unless_left
from draftkit.serving.texts import Texts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GRACE_SECONDS = 10.0  # beyond the deadline of a request, after which nobody waits for the engine


class Service:
    """What the routes of one app share."""

    def __init__(self, engine: Engine, intake: Intake, metrics: Metrics, *, seconds: float) -> None:
        """`seconds`: after which a request is given up whatever the engine does."""
        self.engine = engine
        self.intake = intake
        self.metrics = metrics
        self._seconds = seconds
        self._turn = asyncio.Lock()  # to make a part of a whole answer

    async def answer(self, request: Request, asked: Asked, began: float) -> Response:
        """Submit the jobs; the whole answer, or the beginning of a stream."""
        answers = self._submitted(asked)
        reader = Reader(asked, answers, self.metrics, began)
        if asked.streams:
            return EventStream(reader, seconds=self._seconds)
        is_whole = False
        try:
            async with asyncio.timeout(self._seconds):
                await unless_left(request.receive, reader.all())
            is_whole = True
        except ClientLeft:
            return Response(status_code=499)  # nobody reads it
        except TimeoutError:
            failed = failure_of("timeout")
            assert failed is not None
            raise failed from None
        finally:
            if not is_whole:
                await reader.close()
        return WholeAnswer(reader, turn=self._turn, seconds=self._seconds)

    def _submitted(self, asked: Asked) -> Answers:
        try:
            return Answers(self.engine, asked.jobs)
        except QueueFull as full:
            seconds = str(max(1, math.ceil(full.retry_after)))
            raise Failed(429, str(full), "queue_full", headers={"retry-after": seconds}) from full
        except Draining as draining:
            reason = "the server is stopping and takes no more requests"
            raise Failed(503, reason, "draining", headers={"retry-after": "5"}) from draining
        except ValueError as error:
            raise BadRequest(" ".join(str(error).split())) from error


def make_app(
    engine: Engine,
    texts: Texts,
    settings: ServeConfig,
    *,
    sampling: SamplingConfig,
    routes: Sequence[str],
    model_name: str,
    key: str | None,
) -> FastAPI:
    """The server's app.

    sampling: of requests that name none; routes: what `X-Draftkit-Route` may say; key: None lets
    everybody in, otherwise nothing but `/health` answers without it.
    """
    intake = Intake(
        texts,
        settings,
        max_length=engine.max_length,
        sampling=sampling,
        routes=routes,
        model_name=model_name,
    )
    metrics = Metrics(engine, model_name)
    seconds = settings.request_seconds + GRACE_SECONDS
    app = FastAPI(
        title="draftkit",
        docs_url=None,  # these pages load scripts from afar
        redoc_url=None,
        responses={"4XX": {"description": "What is wrong, in OpenAI's form of errors"}},
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    limits = {"key": key, "host": settings.host, "max_body_bytes": settings.max_body_bytes}
    app.add_middleware(Limits, **limits)
    _add_generation(app, Service(engine, intake, metrics, seconds=seconds))
    _add_information(app, engine, metrics, model_name)
    _add_errors(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        began = time.monotonic()
        name = request.state.request_id
        asked = await service.intake.completion(body, request.headers, name)
        return await service.answer(request, asked, began)

    @app.post(CHAT)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        began = time.monotonic()
        asked = await service.intake.chat(body, request.headers, request.state.request_id)
        return await service.answer(request, asked, began)


def _add_information(app: FastAPI, engine: Engine, metrics: Metrics, model_name: str) -> None:
    model = {"id": model_name, "object": "model", "created": int(time.time())}
    model |= {"owned_by": "draftkit", "max_model_len": engine.max_length}

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The model, if that is its name."""
        if name != model_name:
            raise UnknownModel(name)
        return json_response(model)

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken and answered."""
        if not engine.healthy():
            return json_response({"status": "failed"}, 503)
        if engine.load().draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def exposition() -> Response:
        """For Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    bodies = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}

    @app.exception_handler(Failed)
    async def failed(_: Request, error: Failed) -> Response:
        return error.response

    @app.exception_handler(BadRequest)
    async def bad(_: Request, error: BadRequest) -> Response:
        return Failed(400, str(error), error.code, param=error.param).response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        model = bodies.get(request.url.path, CompletionRequest)
        return await bad(request, explain(error.errors(), model))

    @app.exception_handler(UnknownModel)
    async def unknown(_: Request, error: UnknownModel) -> Response:
        message = f"there is no model {str(error)[:SHOWN]!r}: GET /v1/models lists what there is"
        return Failed(404, message, "model_not_found", param="model").response

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        messages = {
            400: "the body is no JSON in UTF-8",
            404: f"there is nothing at {request.url.path[:SHOWN]!r}",
            405: f"{request.method} is not possible at {request.url.path[:SHOWN]!r}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return Failed(error.status_code, message, None, headers=error.headers).response

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        return Failed(500, "an error of the server, told in its log", "internal_error").response
