"""The server, what it records of its traffic, and how the drafter is refitted from that."""

import re
from dataclasses import dataclass, field

from draftkit.config.choices import Section, positive, require, setting

DEFAULT_ROUTE = "default"
LEAST_PROMPTS = 20  # different ones, below which no gate decides: intervals of fewer are too narrow
ROUTE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")  # also the name of a folder


@dataclass(kw_only=True)
class ServeConfig(Section, key="serve"):
    """An OpenAI-compatible server. Its key, if any, is in the environment: DRAFTKIT_API_KEY."""

    host: str = "127.0.0.1"
    port: int = setting(8000, least=0, most=65535)  # 0: any that is free, printed at the start
    model_name: str | None = None  # what clients call it; null: the last part of `target.path`
    slots: int = positive(16)  # rows that are decoded at once
    max_length: int = positive(2048)  # tokens of prompt and answer; at most the models' context
    queue: int = positive(64)  # requests that may wait for a slot; more are answered with 429
    request_seconds: float = positive(300.0)
    adapts: bool = True  # gamma by load and acceptance; requests with a seed keep decode.gamma


@dataclass(kw_only=True)
class BufferConfig(Section, key="online.buffer"):
    """What of the traffic is kept, for how long, and how much of it."""

    fraction: float = setting(1.0, least=0, most=1)  # of the requests; 0 records nothing
    top_k: int = setting(32, least=0)  # ids of the target stored for every token; 0: none
    max_megabytes: float = positive(256.0)  # of records; the file may take twice as much
    retention_days: float = positive(30.0)


@dataclass(kw_only=True)
class GateConfig(Section, key="online.gate"):
    """When a refitted drafter may be served."""

    # Of the recorded conversations, never trained on: the gate's.
    fraction: float = setting(0.2, above=0, below=1)
    records: int = setting(  # of them, the most recent
        128, least=LEAST_PROMPTS, hint=", as it takes so many prompts to decide"
    )
    anchors: int = setting(64, least=0)  # held-out texts of `data`
    # Alpha (of a parallel drafter: tokens a pass) that they may lose since the first version.
    anchor_tolerance: float = setting(0.02, least=0)


@dataclass(kw_only=True)
class OnlineConfig(Section, key="online"):
    """The refit loop. `optim` says how it steps, `divergence` what it minimises."""

    routes: list[str] = field(default_factory=lambda: [DEFAULT_ROUTE])  # each with its drafter
    route: str = DEFAULT_ROUTE  # which `rollback` takes back
    version: str | None = None  # to which; null: the one before
    # target: in memory; stored: its scores in the buffer, exact for the kept ids.
    teacher: str = setting("target", names=("stored", "target"))
    prompts: bool = False  # learn from prompts too: for short ones that differ; asks the target
    poll_seconds: float = positive(2.0)
    min_records: int = positive(64)  # new ones that an update waits for
    steps: int = positive(20)  # of an update
    recent: int = positive(512)  # how many of the newest records count as recent
    # Of the rows of a step; half of them are of recent traffic, the rest of older.
    anchor_fraction: float = setting(0.25, least=0, most=0.5)
    most_updates: int | None = positive(None)  # null: until told to stop
    buffer: BufferConfig = field(default_factory=BufferConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "be false with online.teacher=stored, which knows answers alone"
        self.require(not self.prompts or self.teacher == "target", "prompts", rule)
        for route in self.routes:
            fits = ROUTE.fullmatch(route) is not None
            require(fits, "online.routes", "be of a-z, 0-9, _ and -, at most 32 long", route)
        unique = len(set(self.routes)) == len(self.routes) and DEFAULT_ROUTE in self.routes
        self.require(unique, "routes", f"hold {DEFAULT_ROUTE}, and none twice")
        self.require(self.route in self.routes, "route", "be in online.routes")
