"""An engine on the loopback that answers `/v1/completions` from a tiny model, greedily."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftkit.config import SamplingConfig
from tests.distillation.making import sampler_of


class Engine:
    """What was asked, and what shall be answered."""

    def __init__(self, model, eos_token_ids, decode):
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.decode = decode
        self.returns_ids = True
        self.changes_prompts = False
        self.failures = []  # states to answer with before all else
        self.body = None  # to answer with instead
        self.asked = []
        self.headers = []
        self.url = ""
        self._lock = threading.Lock()

    def answer(self, request):
        """Status and body of the answer to one request."""
        with self._lock:  # one at a time: the model is one
            self.asked.append(request)
            if self.failures:
                return self.failures.pop(0), {"error": "not now"}
            return 200, self.body or self._complete(request)

    def _complete(self, request):
        sampling, limit = SamplingConfig(temperature=0.0), request["max_tokens"]
        limits = {"max_new_tokens": limit, "max_length": 1 << 20, "batch_size": 1}
        limits |= {"sampling": sampling, "eos_token_ids": self.eos_token_ids}
        sampler = sampler_of(self.model, **limits)
        (record,) = sampler.sample([request["prompt"]], rows=[0], version="")
        ids = record.output_ids
        ended = ids[-1] in self.eos_token_ids
        text = self.decode(ids[:-1] if ended else ids)
        choice = {"index": 0, "text": text, "finish_reason": "stop" if ended else "length"}
        if self.returns_ids:
            prompt = [1, *request["prompt"]] if self.changes_prompts else request["prompt"]
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return {"object": "text_completion", "choices": [choice]}


@contextmanager
def served(engine: Engine) -> Iterator[Engine]:
    """`engine` at `engine.url` while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            engine.headers.append(self.headers)
            found = self.path == "/v1/completions"
            status, body = engine.answer(json.loads(content)) if found else (404, {})
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Location", self.path)  # read with a redirect alone
            self.send_header("Retry-After-Ms", "1")  # read with a state that may pass alone
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
