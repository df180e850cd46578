"""`python -m pipelines.capture engine.url=http://127.0.0.1:8000`: a recording proxy.

Clients ask it in place of the engine (vLLM, SGLang, llama.cpp, any server of OpenAI's API), and see
no difference. What they are answered becomes records of the experiment's service folder, from which
`pipelines.online` refits the drafter. With `capture.logs=FILE` chats of the past become records,
without an engine. SIGTERM and Ctrl-C end it: what was answered is written first. It listens as
`pipelines.serve` does: at an address that is not loopback by the key of DRAFTKIT_API_KEY alone.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice

from draftkit.artifacts import locked
from draftkit.config import DEFAULT_ROUTE, Config
from draftkit.data.corpora import read_documents
from draftkit.data.prompts import RowReader
from draftkit.data.rollouts import Record
from draftkit.endpoint import Endpoint
from draftkit.models.files import ModelFolder
from draftkit.models.vocabulary import count_ids
from draftkit.online.buffer import Buffer
from draftkit.serving.intake import Texts, conversation_of
from draftkit.serving.proxy import Proxy
from draftkit.serving.recorder import BATCH
from draftkit.serving.server import Server

from .command import run_command
from .plan import CAPTURE, lengths_of
from .product import plan
from .serve import listening_to, url_of
from .service import SERVER, buffer_of, checksums_of, recorder_of, registry_of, service_folder
from .stage import inputs_of, show_plan

PROBE = "Three words: one, two, three."  # whose ids tell one vocabulary from another


def knows_ids(endpoint: Endpoint, model: str, texts: Texts) -> bool:
    """Whether the engine tells the ids of what it reads and writes.

    Raises ValueError naming `engine.url` for one that reads a text by other ids than `target.path`.
    """
    (read, written), expected = endpoint.ids_of(model, PROBE), texts.encode(PROBE)
    if read and read != expected:
        raise endpoint.failure(
            f"reads {PROBE!r} as {read}, and the tokenizer of target.path as {expected}: name the "
            "model that it serves by target.path"
        )
    return bool(read and written)


def logged(config: Config, target: str) -> Iterator[Record]:
    """The answers of `capture.logs`, in the order of the file, as if they had been served.

    target: the checksum of the model that wrote them.
    """
    data = replace(config.data, name="local", path=config.capture.logs)
    folder = ModelFolder(config.target)
    reader = RowReader(folder.tokenizer, data, lengths_of(config), start=folder.start)
    row = 0
    for document, examples in reader.read(read_documents(data, target=target)):
        turns = document.row.get("messages")
        for one in examples:
            if not one.has_completion or "text" in document.row:
                continue
            yield Record(
                prompt_ids=one.prompt_ids,
                output_ids=one.token_ids[len(one.prompt_ids) :],
                sampler="logs",
                sampler_version="",
                sampling=dict(vars(config.sampling)),
                seed=0,
                row=row,
                document=one.document if turns is None else conversation_of(turns),
                domain=one.domain,
            )
            row += 1


def read_logs(config: Config, buffer: Buffer, target: str) -> int:
    """Store what is `logged`; how many there were."""
    records, count = logged(config, target), 0
    try:
        while lot := [(DEFAULT_ROUTE, record) for record in islice(records, BATCH)]:
            buffer.append(lot)
            count += len(lot)
    except ValueError as error:  # they are read as data are
        raise ValueError(str(error).replace("data.path", "capture.logs")) from error
    return count


def capture(config: Config) -> None:
    """Record until told to stop, or what the logs hold."""
    if config.job:
        raise ValueError("a proxy cannot be swept: start one for each setting, without -m")
    if config.plan:
        return show_plan("capture", plan(CAPTURE, config).made())
    url, logs = config.engine.url, config.capture.logs
    if url is None and logs is None:
        raise ValueError("engine.url: name the engine that runs, as http://127.0.0.1:8000")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    with ExitStack() as stack:
        # Of two, each would overwrite how busy the other says it is, which the daemon goes by.
        stack.enter_context(locked(service_folder(config) / SERVER))
        made = inputs_of(CAPTURE, config)
        buffer = stack.enter_context(closing(buffer_of(config, checksums_of(config, made))))
        if logs is not None:
            count = read_logs(config, buffer, made.digests["target"])
            print(f"capture: {count:,} answers of {logs} are records now")
            return None
        assert url is not None
        listening, key = listening_to(config, stack, port=config.capture.port, name="capture.port")
        target = ModelFolder(made.model(config, "target"))
        # An engine puts no turn in front of a chat, and gives its template no options.
        data = replace(config.data, system=None, template_options={})
        texts = Texts(target.tokenizer, count_ids(target.tokenizer), data)
        with Endpoint("engine.url", url) as endpoint:
            # Adapters name a parent, and have another law.
            models = [one["id"] for one in endpoint.models() if not one.get("parent")]
            has_ids = knows_ids(endpoint, models[0], texts)
        if target.generation.min_p:
            print("capture: generation_config.json names min_p, which no record says: start vLLM")
            print("capture: with --generation-config vllm, or its answers have another law")
        recorder = recorder_of(config, buffer, made.digests["target"])
        proxy = Proxy(
            endpoint.url,
            recorder,
            texts,
            has_ids=has_ids,
            models=models,
            default=config.sampling,
            routes=config.online.routes,
            version=lambda route: registry_of(config, route).served(),
            fraction=config.online.buffer.fraction,
            key=key,
            host=config.serve.host,
        )
        if not has_ids:
            print("capture: the engine tells no ids: texts are tokenised here, which may cut them")
            print("capture: otherwise than they were sampled", flush=True)
        server = Server(proxy, drain=lambda: None, close=proxy.close, is_limited=False)
        recorder.start(proxy.counters)
        stack.callback(recorder.stop)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        address = url_of(listening.getsockname())
        print(f"capture: {endpoint.url} is recorded at {address}/v1", flush=True)
        server.run(sockets=[listening])
    return None


if __name__ == "__main__":
    run_command("capture", capture)
