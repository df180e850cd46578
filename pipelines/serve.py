"""`python -m pipelines.serve`: target and drafter behind an OpenAI-compatible API.

Serves the newest published drafter of the experiment's service folder (at first the starting
draft), follows what `pipelines.online` publishes there, and records traffic for it. A folder that
was made with another target or starting draft is refused; `overwrite=true` clears it. SIGTERM and
Ctrl-C end it in order: no new requests, those under way are answered, exit code 0. A key in the
environment variable DRAFTKIT_API_KEY closes it to everybody without; it is needed for every address
that is not loopback.
"""

import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftkit.artifacts import locked
from draftkit.config import Config
from draftkit.data.splits import read_splits
from draftkit.decoding.catalogue import proposer_of
from draftkit.models.files import ModelFolder
from draftkit.models.loading import Target, load_draft, load_target
from draftkit.serving.drafters import Drafters, Route
from draftkit.serving.engine import Engine
from draftkit.serving.intake import Intake, Texts
from draftkit.serving.server import DRAIN_SECONDS, Server, listen, make_app

from .command import run_command
from .plan import SERVE
from .prepare import check_pair
from .product import plan
from .service import (
    SERVER,
    STATE,
    buffer_of,
    checksums_of,
    clear_service,
    recorder_of,
    seeded_registry,
    service_folder,
)
from .stage import StageFolder, inputs_of, show_plan

KEY_VARIABLE = "DRAFTKIT_API_KEY"


def api_key() -> str | None:
    """The key that clients must send, None for none. Raises ValueError for an empty one."""
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"{KEY_VARIABLE} is empty: unset it, or give it a key")
    return None if key is None else key.strip()


def drafters_of(config: Config, made: StageFolder, target: Target) -> Drafters:
    """A proposer for each route; one with a drafter follows the route's registry.

    A registry that is empty gets the starting drafter.
    """
    draft = made.model(config, "draft")
    decode = config.decode
    if not decode.has_drafter:
        name = decode.proposer
        print(f"serve: decode.proposer={name} has no drafter: no published version is followed")
    routes = []
    for name in config.online.routes:
        registry = shape = None
        if decode.has_drafter:
            shape = ModelFolder(draft).config
            registry = seeded_registry(config, name, draft, target, checksums_of(config, made))
        proposer = proposer_of(
            config,
            lambda: load_draft(draft, target),
            lambda: (example.token_ids for example in read_splits(made.inputs["texts"]).train),
            target.adapter,
        )
        proposer.version = "" if decode.has_drafter else decode.proposer
        routes.append(Route(name, proposer, registry, shape))
    return Drafters(routes)


def url_of(address: Sequence[Any]) -> str:
    """The URL of a listening address."""
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listening_to(
    config: Config, stack: ExitStack, *, port: int, name: str = "serve.port"
) -> tuple[socket.socket, str | None]:
    """A socket that listens at `serve.host` and the port `name` until `stack` ends, and the key.

    Raises ValueError for an address that is open to others while there is no key.
    """
    host, key = config.serve.host, api_key()
    listening = stack.enter_context(closing(listen(host, port, name)))
    address = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])
    if key is None and not address.is_loopback:
        raise ValueError(
            f"serve.host={host} is open to other machines and there is no key: set "
            f"{KEY_VARIABLE}, or serve.host=127.0.0.1 behind a proxy that asks for one"
        )
    return listening, key


def serve(config: Config) -> None:
    """Serve until told to stop. There is one server, so a sweep is refused."""
    if config.job:
        raise ValueError("a server cannot be swept: start one for each setting, without -m")
    if config.plan:
        return show_plan("serve", plan(SERVE, config).made())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    settings = config.serve
    with ExitStack() as stack:
        # Before the models are loaded, lest that was in vain.
        listening, key = listening_to(config, stack, port=settings.port)
        # Of two, each would overwrite how busy the other says it is, which the daemon goes by.
        stack.enter_context(locked(service_folder(config) / SERVER))
        check_pair(config)
        made = inputs_of(SERVE, config)
        target_config, fingerprints = made.model(config, "target"), checksums_of(config, made)
        if config.overwrite:
            print(f"serve: clearing {service_folder(config)} (overwrite=true)", flush=True)
            clear_service(config, STATE)
        buffer = stack.enter_context(closing(buffer_of(config, fingerprints)))
        target = load_target(target_config, config.hardware)
        # What a client reads: without special tokens, with all spaces.
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        detokenize: Any = partial(target.tokenizer.decode, **options)
        engine = Engine(
            target.adapter,
            drafters_of(config, made, target),
            detokenize=detokenize,
            eos_token_ids=target.eos_token_ids,
            serve=settings,
            decoding=replace(config.decode, gamma=config.proposals),
            recorder=recorder_of(config, buffer, fingerprints["target"]),
        )
        intake = Intake(
            texts=Texts(
                target.tokenizer,
                target.adapter.vocab_size,
                config.data,
                start=target.adapter.start_id,
            ),
            settings=settings,
            max_length=engine.max_length,
            sampling=config.sampling,
            routes=config.online.routes,
            model_name=settings.model_name or Path(str(target_config.path)).name,
        )
        app = make_app(engine, intake, key=key)
        server = Server(app, drain=lambda: engine.drain(DRAIN_SECONDS))
        stack.callback(engine.stop)
        engine.start()
        gc.collect()
        gc.freeze()  # libraries and models: to look through them stops every thread for 0.2 s
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again at its end
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        address = url_of(listening.getsockname())
        print(f"serve: {intake.model_name} answers at {address}/v1", flush=True)
        server.run(sockets=[listening])


if __name__ == "__main__":
    run_command("serve", serve)
