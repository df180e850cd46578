"""What goes over the wire: JSON as it is sent, and errors in OpenAI's form with one line of reason.

Iterators in a value are lists whose entries are made while they are encoded, a little at a time.
Knows no routes and no engine.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import Response

Json = dict[str, Any]
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Why a request is not answered: the status, OpenAI's code, and the parameter to blame."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> Json:
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, other)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(content), status, headers, "application/json")


def encode(value: object) -> bytes:
    """JSON as it is sent. Raises ValueError for NaN and infinity."""
    return in_utf8("".join(bits(value)))


def in_utf8(text: str) -> bytes:
    """JSON text in bytes, half of a character as JSON escapes it."""
    return text.encode("utf-8", "backslashreplace")


def bits(value: object) -> Iterator[str]:
    """`value` as JSON, each bit of it made when it is wanted; an entry of an iterator is one bit.

    Raises ValueError for NaN and infinity.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else ''}{_ENCODER.encode(name)}:"
            yield from bits(each)
        yield "}"
    elif isinstance(value, list | Iterator):
        yield "["
        for number, each in enumerate(value):
            if number:
                yield ","
            yield from bits(each) if isinstance(value, list) else [_ENCODER.encode(each)]
        yield "]"
    else:
        yield _ENCODER.encode(value)
