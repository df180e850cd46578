"""What goes into the engine and what comes out of it: jobs, pieces of answers, counts.

Plain values without models, files or HTTP: the engine makes them on its thread, others read them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftkit.config import DEFAULT_ROUTE, SamplingConfig


class QueueFull(Exception):
    """No room for the jobs at the moment."""


class Draining(Exception):
    """The engine takes no more jobs: it is about to stop."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to be decoded: a choice of a request."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    # None: the engine draws one. Given: fixed gamma, so that in float32 the answer does not depend
    # on the rows beside it.
    seed: int | None = None
    continues: bool = True  # the prompt's text; a chat's answer is a text of its own
    row: int = 0  # number of the choice: with the seed, the key of the noise
    stops: tuple[str, ...] = ()
    top_logprobs: int = 0  # alternatives wanted for each token
    route: str = DEFAULT_ROUTE
    conversation: str = ""  # of which it is a turn; empty: the prompt stands for itself
    records: bool = True  # False: the owner opted out, nothing of it may reach the disk
    deadline: float | None = None  # time.monotonic() at which it ends as "timeout"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One output token under the target at temperature 1, without penalties or cuts."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ids, descending, `top_logprobs` of them


@dataclass(frozen=True)
class Speculation:
    """What speculation did for one answer."""

    rounds: int
    drafted: int
    accepted: int
    tested: int  # positions at which an acceptance test was made
    acceptance: float  # sum over them of the chance to be accepted
    version: str  # of the drafter, at the end


@dataclass(frozen=True)
class Piece:
    """What a round brought for one job; the last piece alone has a finish reason.

    "stop", "length", "timeout", "cancelled" or "error". `text` is final: unfinished characters
    and what may be the beginning of a stop string come with a later piece.
    """

    text: str
    scores: tuple[TokenScore, ...]
    finish_reason: str | None = None
    speculation: Speculation | None = None


Listener = Callable[[Piece], None]  # called on the engine's thread, must not block


@dataclass
class DrafterCounters:
    """Sums since the start over the finished and running jobs of one route and version."""

    requests: int = 0  # finished, by whatever reason
    tokens: int = 0  # that listeners were told: no stop string takes them back, so it never falls
    rounds: int = 0
    drafts: int = 0  # rounds with proposals
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    tested: int = 0
    acceptance: float = 0.0
    seconds: float = 0.0  # of its rounds, whose time their rows share


DrafterKey = tuple[str, str]  # route and version


@dataclass
class Counters:
    """How many jobs wait and run now, and all counts since the start."""

    queued: int = 0
    running: int = 0
    drafters: dict[DrafterKey, DrafterCounters] = field(
        default_factory=lambda: defaultdict(DrafterCounters)
    )
    prompt_tokens: int = 0
    errors: int = 0  # rounds that failed
    swaps: int = 0
    refused_versions: int = 0
    last_swap_seconds: float = 0.0  # for which rounds waited
    records_dropped: int = 0

    @property
    def generated_tokens(self) -> int:
        return sum(drafter.tokens for drafter in self.drafters.values())
