"""An engine on the loopback that answers `/v1/completions` from a tiny model, greedily, and scores
given texts as vLLM does."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from draftkit.config import SamplingConfig
from draftkit.distillation.remote import RemoteTarget
from tests import tiny
from tests.distillation.making import sampler_of


class Engine:
    """What was asked, and what shall be answered."""

    def __init__(self, model, eos_token_ids, decode, encode=None):
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.decode = decode
        self.encode = encode
        self.name = "tiny"
        self.max_logprobs = 64
        self.max_model_len = None
        self.scores = True  # given texts
        self.is_stale = False  # the scores of every second text are those of another
        self.scored = 0
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
            if request.get("prompt_logprobs", 0) > self.max_logprobs:
                return 400, {"error": f"greater than max allowed: {self.max_logprobs}"}
            return 200, self.body or self._complete(request)

    def _complete(self, request):
        sampling, limit = SamplingConfig(temperature=0.0), request["max_tokens"]
        limits = {"max_new_tokens": limit, "max_length": 1 << 20, "batch_size": 1}
        limits |= {"sampling": sampling, "eos_token_ids": self.eos_token_ids}
        sampler = sampler_of(self.model, **limits)
        if isinstance(request["prompt"], str):
            request = {**request, "prompt": self.encode(request["prompt"])}
        if "prompt_logprobs" in request and self.scores:
            return {"choices": [{"text": "", "prompt_logprobs": self._rows(request)}]}
        (record,) = sampler.sample([request["prompt"]], rows=[0], version="")
        ids = record.output_ids
        ended = ids[-1] in self.eos_token_ids
        text = self.decode(ids[:-1] if ended else ids)
        choice = {"index": 0, "text": text, "finish_reason": "stop" if ended else "length"}
        if self.returns_ids:
            prompt = [1, *request["prompt"]] if self.changes_prompts else request["prompt"]
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return {"object": "text_completion", "choices": [choice]}

    def _rows(self, request):
        """The likeliest ids at every token, and that token, as vLLM names them."""
        self.scored += 1
        ids = torch.tensor([request["prompt"]])
        if self.is_stale and self.scored % 2 == 0:
            ids = ids.flip(1)
        with torch.no_grad():
            logits = self.model.score(ids, torch.ones_like(ids, dtype=torch.bool))
        rows = [None]
        for place, token in enumerate(request["prompt"][1:]):
            known = logits[place].double().log_softmax(-1)
            values, best = known.topk(min(request["prompt_logprobs"], len(known)))
            pairs = [
                *zip(best.tolist(), values.tolist(), strict=True),
                (token, float(known[token])),
            ]
            rows.append(
                {
                    str(one): {"logprob": value, "rank": rank, "decoded_token": ""}
                    for rank, (one, value) in enumerate(pairs, 1)
                }
            )
        return rows


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
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            known = {"id": engine.name, "max_model_len": engine.max_model_len}
            content = json.dumps({"data": [known]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(content)))
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


def remote(*engines, top_k=0, tokenizer=None, **known):
    """The target that `engines` serve."""
    tokenizer = tokenizer or tiny.byte_tokenizer()
    return RemoteTarget(
        tokenizer=tokenizer,
        eos_token_ids=(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        urls=[engine.url for engine in engines],
        model="tiny",
        vocab_size=tiny.VOCAB_SIZE,
        longest=tiny.MAX_POSITIONS - 1,
        **{"top_k": top_k, "at_once": 3} | known,
    )
