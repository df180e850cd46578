"""The server, what it records of its traffic, and how the drafter is refitted from that."""

import re
from dataclasses import dataclass, field

from draftkit.config.choices import Section, check_address, choice, positive, require, setting

DEFAULT_ROUTE = "default"
LEAST_PROMPTS = 20  # different ones, below which no gate decides: intervals of fewer are too narrow
ROUTE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")  # also the name of a folder


@dataclass(kw_only=True)
class ServeConfig(Section, key="serve"):
    """An OpenAI-compatible server. Its key, if any, is in the environment: DRAFTKIT_API_KEY."""

    host: str = setting("127.0.0.1", "address that it listens at")
    port: int = setting(8000, "0: any that is free, printed at the start", "[0, 65535]")
    model_name: str | None = setting(None, "for clients; null: the end of target.path")
    slots: int = positive(16, "rows that are decoded at once")
    max_length: int = positive(2048, "tokens of prompt and answer, at most the models' context")
    queue: int = positive(64, "requests that may wait for a slot; more are answered with 429")
    request_seconds: float = positive(300.0, "seconds after which a request is given up")
    adapts: bool = setting(
        True,
        "gamma follows load and acceptance; not of a hybrid with decode.draft_gamma, nor where a "
        "request has a seed",
    )


@dataclass(kw_only=True)
class CaptureConfig(Section, key="capture"):
    """A recording proxy before the engine at `engine.url`. It listens at `serve.host`."""

    port: int = setting(8001, "0: any that is free, printed at the start", "[0, 65535]")
    logs: str | None = setting(None, "chats of the past, a file, that become records; then it ends")


@dataclass(kw_only=True)
class BufferConfig(Section, key="online.buffer"):
    """What of the traffic is kept, for how long, and how much of it."""

    fraction: float = setting(1.0, "share of the requests that is recorded", "[0, 1]")
    top_k: int = setting(32, "likeliest ids stored with every token; 0: none", "[0, inf)")
    max_megabytes: float = positive(256.0, "size of all records; the file may take twice as much")
    retention_days: float = positive(30.0, "days after which a record is deleted")


@dataclass(kw_only=True)
class GateConfig(Section, key="online.gate"):
    """When a refitted drafter may be served."""

    fraction: float = setting(
        0.2, "share of the conversations that decide and are never learned", "(0, 1)"
    )
    records: int = setting(
        128, "the newest of these, which decide; fewer than 20 cannot", f"[{LEAST_PROMPTS}, inf)"
    )
    anchors: int = setting(64, "held-out texts of `data` that show forgetting", "[0, inf)")
    anchor_tolerance: float = setting(
        0.02, "alpha that these may lose since the first version (in one pass: tokens)", "[0, inf)"
    )


@dataclass(kw_only=True)
class OnlineConfig(Section, key="online"):
    """The refit loop. `optim` says how it steps, `divergence` what it minimises."""

    routes: list[str] = setting([DEFAULT_ROUTE], "topics of requests, each with its drafter")
    route: str = setting(DEFAULT_ROUTE, "the one that `rollback` takes back")
    version: str | None = setting(None, "the one that `rollback` goes to; null: the one before")
    teacher: str = choice(
        "target",
        "who scores the records",
        stored="the scores in the buffer, exact for the ids that it keeps",
        target="the target, in memory",
    )
    prompts: bool = setting(
        False, "learn from prompts too, for short ones that differ; asks the target"
    )
    poll_seconds: float = positive(2.0, "seconds between two looks at the buffer")
    min_records: int = positive(64, "new records that an update waits for")
    steps: int = positive(20, "optimizer steps of an update")
    recent: int = positive(512, "how many of the newest records count as recent")
    anchor_fraction: float = setting(
        0.25, "share of rows that are of `data`; half are recent, others older", "[0, 0.5]"
    )
    sink: str | None = setting(
        None, "address that gets a copy of every record, for trainers elsewhere (s3://, file://)"
    )
    push: str = choice(
        "none",
        "how a version reaches the engine that serves",
        none="it does not: draftkit's own server looks for itself",
        vllm="into the running vLLM at engine.url, which is read back",
        command="by online.command, which may start another engine",
    )
    command: str | None = setting(
        None, "command line that gets DRAFTKIT_DRAFT (folder), DRAFTKIT_VERSION, DRAFTKIT_ROUTE"
    )
    most_updates: int | None = positive(None, "updates after which it ends; null: none")
    buffer: BufferConfig = field(default_factory=BufferConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "be false with online.teacher=stored, which knows answers alone"
        self.require(not self.prompts or self.teacher == "target", "prompts", rule)
        given = self.push != "command" or self.command is not None
        self.require(given, "command", "be given with online.push=command")
        check_address("online.sink", self.sink or "")
        for route in self.routes:
            fits = ROUTE.fullmatch(route) is not None
            require(fits, "online.routes", "be of a-z, 0-9, _ and -, at most 32 long", route)
        unique = len(set(self.routes)) == len(self.routes) and DEFAULT_ROUTE in self.routes
        self.require(unique, "routes", f"hold {DEFAULT_ROUTE}, and none twice")
        self.require(self.route in self.routes, "route", "be in online.routes")
        single = self.push != "vllm" or len(self.routes) == 1
        self.require(single, "routes", "be one with online.push=vllm, which has one drafter")
