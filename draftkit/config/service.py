"""The server, what it records of its traffic, and how the drafter is refitted from that."""

import re
from dataclasses import dataclass, field

from draftkit.config.choices import (
    ONLINE_TASKS,
    TEACHER_NAMES,
    require,
    require_choice,
    require_positive,
)

DEFAULT_ROUTE = "default"
LEAST_PROMPTS = 20  # different ones, below which no gate decides: intervals of fewer are too narrow
ROUTE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")  # also the name of a folder


@dataclass(kw_only=True)
class ServeConfig:
    """An OpenAI-compatible server. Its key, if any, is in the environment: DRAFTKIT_API_KEY."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free, printed at the start
    model_name: str | None = None  # what clients call it; null: the last part of `target.path`
    slots: int = 16  # rows that are decoded at once
    max_length: int = 1024  # tokens of prompt and answer; never above the models' context
    queue: int = 64  # requests that may wait for a slot; more are answered with 429
    max_body_bytes: int = 1_000_000
    max_choices: int = 16  # `n` of a request
    top_logprobs: int = 20  # the most alternatives a request may ask for
    connections: int = 2048
    request_seconds: float = 300.0
    drain_seconds: float = 30.0
    poll_seconds: float = 0.5  # how often a new drafter version is looked for
    adapts: bool = True  # gamma by load and acceptance; requests with a seed keep decode.gamma

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "serve.port", "lie in 0..65535", self.port)
        require_positive(self, "serve", "slots", "max_length", "queue", "max_body_bytes")
        require_positive(self, "serve", "max_choices", "connections", "request_seconds")
        require_positive(self, "serve", "drain_seconds", "poll_seconds")
        require(self.top_logprobs >= 0, "serve.top_logprobs", "be at least 0", self.top_logprobs)


@dataclass(kw_only=True)
class BufferConfig:
    """What of the traffic is kept, for how long, and how much of it."""

    fraction: float = 1.0  # of the requests; 0 records nothing
    top_k: int = 32  # ids of the target stored for every token; 0: none
    max_megabytes: float = 256.0
    reservoir_fraction: float = 0.5  # of that room, for a sample of all that is no longer recent
    retention_days: float = 30.0
    queue: int = 1024  # records that wait to be written; more are dropped, never waited for

    def __post_init__(self) -> None:
        require(0 <= self.fraction <= 1, "online.buffer.fraction", "lie in [0, 1]", self.fraction)
        require(self.top_k >= 0, "online.buffer.top_k", "be at least 0 (0: none)", self.top_k)
        require_positive(self, "online.buffer", "max_megabytes", "retention_days", "queue")
        share = self.reservoir_fraction
        require(0 <= share < 1, "online.buffer.reservoir_fraction", "lie in [0, 1)", share)


@dataclass(kw_only=True)
class GateConfig:
    """When a refitted drafter may be served."""

    fraction: float = 0.2  # of the recorded conversations are never trained on: the gate's
    records: int = 128  # of them, the most recent
    anchors: int = 64  # held-out texts of `data`
    anchor_tolerance: float = 0.02  # alpha that they may lose since the first version, at most
    canary_fraction: float = 0.1  # of the rows get a new version first; 0: all at once
    canary_tokens: int = 4000  # tested positions after which a canary is judged

    def __post_init__(self) -> None:
        require(0 < self.fraction < 1, "online.gate.fraction", "lie inside (0, 1)", self.fraction)
        least = f"be at least {LEAST_PROMPTS}, as it takes so many prompts to decide"
        require(self.records >= LEAST_PROMPTS, "online.gate.records", least, self.records)
        require(self.anchors >= 0, "online.gate.anchors", "be at least 0 (0: none)", self.anchors)
        require(
            self.anchor_tolerance >= 0,
            "online.gate.anchor_tolerance",
            "be at least 0",
            self.anchor_tolerance,
        )
        share = self.canary_fraction
        require(0 <= share < 1, "online.gate.canary_fraction", "lie in [0, 1)", share)
        require_positive(self, "online.gate", "canary_tokens")


@dataclass(kw_only=True)
class DriftConfig:
    """The simulated stream of `online.task=drift`: domains that follow each other."""

    domains: list[str] = field(default_factory=lambda: ["prose", "cpp"])  # after the first one
    first: str = "python"  # of which the static drafter has learned
    requests: int = 4000  # of each domain
    max_new_tokens: int = 64
    points: int = 20  # of a domain's curve
    oracle_steps: int = 600

    def __post_init__(self) -> None:
        require_positive(self, "online.drift", "requests", "max_new_tokens", "oracle_steps")
        require(self.points >= 2, "online.drift.points", "be at least 2", self.points)
        require(bool(self.domains), "online.drift.domains", "name at least one", self.domains)
        require(
            self.first not in self.domains,
            "online.drift.first",
            "not be one of online.drift.domains",
            self.first,
        )


@dataclass(kw_only=True)
class TrafficConfig:
    """The load that `online.task=serve_and_refit` puts on its own server."""

    requests: int = 800
    clients: int = 4  # that wait for their answers before they ask again
    max_new_tokens: int = 64
    # Whose prompts are sent: one for each of `online.routes`.
    domains: list[str] = field(default_factory=lambda: ["prose"])

    def __post_init__(self) -> None:
        require_positive(self, "online.traffic", "requests", "clients", "max_new_tokens")


@dataclass(kw_only=True)
class OnlineConfig:
    """The refit loop. `optim` says how it steps, `divergence` what it minimises."""

    task: str = "daemon"
    routes: list[str] = field(default_factory=lambda: [DEFAULT_ROUTE])  # each with its drafter
    route: str = DEFAULT_ROUTE  # task=rollback: of which
    version: str | None = None  # task=rollback: to which; null: the one before
    teacher: str = "target"  # in memory; stored: its scores in the buffer, exact for the kept ids
    prompts: bool = False  # learn from prompts too: for short ones that differ; asks the target
    poll_seconds: float = 2.0
    min_records: int = 64  # new ones that an update waits for
    steps: int = 20  # of an update
    recent: int = 512  # how many of the newest records count as recent
    recent_fraction: float = 0.5  # of the rows of a step
    anchor_fraction: float = 0.25  # of the rows of a step; the rest is of the reservoir
    most_updates: int | None = None  # null: until told to stop
    worth: float = 0.005  # alpha that an update must gain, lest the next one wait longer
    backoff: float = 2.0  # how much longer: times this
    backoff_most: float = 16.0
    pause_queue: int = 8  # requests waiting at the server above which training pauses
    nice: int = 10  # niceness of the training process
    keep: int = 5  # versions; ancestors of what is served stay too
    buffer: BufferConfig = field(default_factory=BufferConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    traffic: TrafficConfig = field(default_factory=TrafficConfig)

    def __post_init__(self) -> None:
        require_choice("online.task", self.task, ONLINE_TASKS)
        require_choice("online.teacher", self.teacher, TEACHER_NAMES)
        require(
            not self.prompts or self.teacher == "target",
            "online.prompts",
            "be false with online.teacher=stored, which knows answers alone",
            self.prompts,
        )
        for route in self.routes:
            fits = ROUTE.fullmatch(route) is not None
            require(fits, "online.routes", "be of a-z, 0-9, _ and -, at most 32 long", route)
        unique = len(set(self.routes)) == len(self.routes) and DEFAULT_ROUTE in self.routes
        require(unique, "online.routes", f"hold {DEFAULT_ROUTE}, and none twice", self.routes)
        require(self.route in self.routes, "online.route", "be in online.routes", self.route)
        require_positive(self, "online", "poll_seconds", "min_records", "steps", "recent", "keep")
        require_positive(self, "online", "most_updates")
        for name in ("recent_fraction", "anchor_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"online.{name}", "lie in [0, 1]", value)
        require(
            self.recent_fraction + self.anchor_fraction <= 1,
            "online.recent_fraction",
            "leave room beside online.anchor_fraction",
            self.recent_fraction,
        )
        require(self.worth >= 0, "online.worth", "be at least 0", self.worth)
        require(self.backoff >= 1, "online.backoff", "be at least 1", self.backoff)
        most = self.backoff_most
        require(most >= 1, "online.backoff_most", "be at least 1", most)
        require(self.pause_queue >= 0, "online.pause_queue", "be at least 0", self.pause_queue)
        require(0 <= self.nice <= 19, "online.nice", "lie in 0..19", self.nice)
