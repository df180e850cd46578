"""An engine in the process, and clients that wait for its answers.

Every wait has a deadline; engines are stopped when their `with` ends.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from safetensors.torch import save_file
from torch import Tensor

from draftkit.config import BufferConfig, DecodeConfig, SamplingConfig, ServeConfig
from draftkit.decoding.catalogue import PROPOSERS
from draftkit.models.adapter import Adapter
from draftkit.online.buffer import Buffer, Served
from draftkit.online.registry import Registry
from draftkit.serving.answers import Answer, Job, Piece
from draftkit.serving.drafters import Drafters, Route
from draftkit.serving.engine import Engine
from draftkit.serving.recorder import Recorder
from tests import tiny
from tests.serving.fakes import wait_for

PATIENCE = 60.0  # seconds that any answer may take
GREEDY = SamplingConfig(temperature=0.0)
TOKENIZER = tiny.byte_tokenizer()
TARGET, DRAFT = tiny.pair()


def draft() -> Adapter:
    """A drafter of its own for each route and engine, since swaps write into it."""
    return copy.deepcopy(DRAFT)


def bytes_text(ids: list[int]) -> str:
    """The text of ids of the byte tokenizer."""
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def letters(ids: list[int]) -> str:
    """A letter for each id, from a on."""
    return "".join(chr(97 + token) for token in ids)


class Client:
    """Listens to one answer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.answer: Answer | None = None  # what the engine calls it
        self.pieces: list[Piece] = []
        self.ended = threading.Event()
        self.started = threading.Event()

    def __call__(self, piece: Piece) -> None:
        assert not self.ended.is_set(), "a piece after the last one"
        self.pieces.append(piece)
        self.started.set()
        if piece.finish_reason is not None:
            self.ended.set()

    def wait(self) -> "Client":
        assert self.ended.wait(PATIENCE), "no answer came"
        return self

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [score.token_id for piece in self.pieces for score in piece.scores]

    @property
    def reason(self) -> str | None:
        return self.pieces[-1].finish_reason

    @property
    def speculation(self) -> Served:
        found = self.pieces[-1].speculation
        assert found is not None
        return found


def job(prompt: Sequence[int], new: int = 12, **others: Any) -> Job:
    settings: dict[str, Any] = {"sampling": SamplingConfig()} | others
    return Job(prompt_ids=prompt, max_new_tokens=new, **settings)


def ask(engine: Engine, *jobs: Job) -> list[Client]:
    """Submit `jobs` together."""
    clients = [Client(one) for one in jobs]
    for client, answer in zip(clients, engine.submit(jobs, clients), strict=True):
        client.answer = answer
    return clients


def answers(engine: Engine, *jobs: Job) -> list[Client]:
    """Submit `jobs` together and wait for them."""
    return [client.wait() for client in ask(engine, *jobs)]


def write(weights: dict[str, Tensor]) -> Callable[[Path], None]:
    """Writes a version of `weights` into the folder that it is given."""
    whole = {name: tensor.clone() for name, tensor in weights.items()}  # of tied ones each its own
    return lambda folder: save_file(whole, folder / "model.safetensors")


def publish(registry: Registry, weights: dict[str, Tensor]) -> str:
    """Publish `weights`; the name of their version."""
    return registry.publish(write(weights), metrics={}).name


Make = Callable[[], Adapter]


def route_of(name: str, make: Make, registry: Any = None, *, proposer: str = "sampled") -> Route:
    """A route whose drafters are made by `make`."""
    return Route(name, PROPOSERS[proposer](make, lambda: [[1, 2, 3]], tiny.adapter()), registry)


@contextmanager
def serving(
    target: Adapter = TARGET,
    make: Make = draft,
    *,
    registries: dict[str, Any] | None = None,
    disk: Any = None,
    buffer: BufferConfig | None = None,
    eos: Sequence[int] = (),
    detokenize: Callable[[list[int]], str] = bytes_text,
    gamma: int = 3,
    verification: str = "speculative",
    started: bool = True,
    proposer: str = "sampled",
    draft_gamma: int | None = None,
    **serve: Any,
) -> Iterator[Engine]:
    """A running engine of `target` and one drafter a route: `make` makes each of them."""
    settings = {"slots": 4, "max_length": 96, "adapts": False}
    routes = registries or {"default": None}
    drafters = Drafters(
        [route_of(name, make, registry, proposer=proposer) for name, registry in routes.items()]
    )
    engine = Engine(
        target,
        drafters,
        detokenize=detokenize,
        eos_token_ids=eos,
        serve=ServeConfig(**settings | serve),
        decoding=DecodeConfig(
            gamma=gamma,
            compile="false",
            verification=verification,
            proposer=proposer,
            draft_gamma=draft_gamma,
        ),
        recorder=Recorder(disk or Mock(Buffer), buffer or BufferConfig(top_k=24)),
    )
    with patch("draftkit.serving.drafters.POLL_SECONDS", 0.01):
        if started:
            engine.start()
        try:
            yield engine
        finally:
            engine.stop()


def stepped(engine: Engine) -> None:
    """Let an engine that was not started decode on this thread until nothing runs or waits."""
    while not engine._is_idle():
        engine._step()


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`."""
    assert wait_for(condition, PATIENCE), "it did not come to that"
