"""The OpenAI API over an engine: `/v1/completions`, `/v1/chat/completions`, models, metrics.

Every error is told in OpenAI's form with one line of reason. This module decodes nothing and knows
no tokenizer's inside: requests become jobs in `intake`, and pieces become answers in `delivery`.
"""

import time

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftkit.serving.delivery import Delivery
from draftkit.serving.engine import Engine
from draftkit.serving.intake import Intake, no_model
from draftkit.serving.jobs import Draining, QueueFull
from draftkit.serving.limits import Limits
from draftkit.serving.metrics import CONTENT_TYPE, Metrics
from draftkit.serving.protocol import (
    SHOWN,
    ApiError,
    ChatRequest,
    CompletionRequest,
    explain,
    json_response,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def make_app(engine: Engine, intake: Intake, *, key: str | None) -> FastAPI:
    """The server's app. `key`: without it nothing but `/health` answers; None: there is none."""
    settings, metrics = intake.settings, Metrics(engine, intake.model_name)
    app = FastAPI(
        title="draftkit",
        docs_url=None,  # these pages load scripts from afar
        redoc_url=None,
        responses={"4XX": {"description": "What is wrong, in OpenAI's form of errors"}},
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.add_middleware(Limits, key=key, host=settings.host)
    _add_generation(app, engine, intake, metrics)
    _add_information(app, engine, intake.model_name, metrics)
    _add_errors(app)
    return app


def _add_generation(app: FastAPI, engine: Engine, intake: Intake, metrics: Metrics) -> None:
    async def answer(body: CompletionRequest | ChatRequest, request: Request) -> Response:
        began = time.monotonic()
        reply = await intake.prepare(body, request.headers)
        delivery = Delivery(engine, reply, metrics, began=began)
        return delivery.stream() if reply.streams else await delivery.whole(request)

    @app.post(COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await answer(body, request)

    @app.post(CHAT)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await answer(body, request)


def _add_information(app: FastAPI, engine: Engine, model_name: str, metrics: Metrics) -> None:
    model = {"id": model_name, "object": "model", "created": int(time.time())}
    model |= {"owned_by": "draftkit", "max_model_len": engine.max_length, "root": model_name}

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The model, if that is its name."""
        if name != model_name:
            raise no_model(name)
        return json_response(model)

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken and answered."""
        if not engine.healthy():
            return json_response({"status": "failed"}, 503)
        if engine.draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def exposition() -> Response:
        """For Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    bodies = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(QueueFull)
    async def full(_: Request, error: QueueFull) -> Response:
        retry = {"retry-after": "1"}
        return ApiError(str(error), status=429, code="queue_full", headers=retry).response

    @app.exception_handler(Draining)
    async def draining(_: Request, error: Draining) -> Response:
        retry = {"retry-after": "5"}
        return ApiError(str(error), status=503, code="draining", headers=retry).response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return explain(error.errors(), bodies[request.scope["path"]]).response

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path, status = request.scope["path"][:SHOWN], error.status_code
        messages = {
            400: "the body is no JSON in UTF-8",
            404: f"there is nothing at {path!r}",
            405: f"{request.method} is not possible at {path!r}",
        }
        message = messages.get(status, str(error.detail))
        return ApiError(message, status=status, headers=error.headers).response

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        message = "an error of the server: its log says which"
        return ApiError(message, status=500, code="internal_error").response
