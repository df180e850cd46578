"""What goes into the engine and what comes out: jobs, answers as they grow, pieces, counts.

Knows no models, threads or HTTP: the engine makes these on its thread, others read them.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from draftkit.config import DEFAULT_ROUTE, SamplingConfig
from draftkit.decoding.generation import Completion
from draftkit.decoding.streaming import Detokenize, TextStream, final_text
from draftkit.online.buffer import Served


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
    stop_token_ids: Collection[int] = ()  # the first of them ends the answer; its text is left out
    ignores_eos: bool = False  # an end of text is a token like others
    # The prompt, told before the answer; empty: as the text of its ids. Not where an encoder reads.
    echo: str | None = None
    top_logprobs: int = 0  # alternatives wanted for each token
    route: str = DEFAULT_ROUTE
    conversation: str = ""  # of which it is a turn; empty: the prompt stands for itself
    records: bool = True  # False: the owner opted out, nothing of it may reach the disk
    deadline: float = math.inf  # time.monotonic() at which it ends as "timeout"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token under the target at temperature 1, without penalties or cuts."""

    token_id: int
    log_prob: float | None  # None: of a prompt's first token, which nothing predicts
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ids, descending, `top_logprobs` of them


@dataclass(frozen=True)
class Piece:
    """What a round brought for one job; the last piece alone has a finish reason.

    "stop", "length", "timeout", "cancelled" or "error". `text` is final: unfinished characters
    and what may be the beginning of a stop string come with a later piece.
    """

    text: str
    scores: tuple[TokenScore, ...]
    finish_reason: str | None = None
    speculation: Served | None = None  # of the whole answer, under its last drafter
    prompt: tuple[TokenScore, ...] = ()  # what is echoed, before all `scores`


Listener = Callable[[Piece], None]  # called on the engine's thread, must not block or raise
DrafterKey = tuple[str, str]  # route and version


@dataclass
class Counters:
    """How many jobs wait and run now, and all counts since the start."""

    queued: int = 0
    running: int = 0
    drafters: dict[DrafterKey, Served] = field(default_factory=dict)  # running jobs count too
    drafts: int = 0  # rounds with proposals
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    errors: int = 0  # rounds that failed
    swaps: int = 0
    refused_versions: int = 0
    last_swap_seconds: float = 0.0  # for which rounds waited
    records_dropped: int = 0

    def of(self, drafter: DrafterKey) -> Served:
        """The counts of a drafter, which go on."""
        return self.drafters.setdefault(drafter, Served(route=drafter[0], version=drafter[1]))

    @property
    def generated_tokens(self) -> int:
        return sum(drafter.tokens for drafter in self.drafters.values())


class Answer:
    """A job on its way through the decoder.

    Scores of tokens are held back as long as text is: a stop string may begin in it, and then its
    tokens are no part of the answer. Raises ValueError for an empty stop string.
    """

    def __init__(self, job: Job, listener: Listener, *, detokenize: Detokenize, seed: int) -> None:
        self.job = job
        self.listener = listener
        self.seed = seed
        self.is_cancelled = False  # it ends at the next round
        self.completion = Completion(list(job.prompt_ids))
        self.version = ""  # of the drafter that proposed last
        self._detokenize = detokenize
        self._stream = TextStream(detokenize, job.stops, job.prompt_ids if job.continues else ())
        self._held: list[TokenScore] = []
        self._sent = 0  # scores

    @property
    def drafter(self) -> DrafterKey:
        return self.job.route, self.version

    def echo(self, scores: Sequence[TokenScore]) -> Piece:
        """The prompt, said before the answer."""
        text = self.job.echo or final_text(list(self.job.prompt_ids), self._detokenize)
        return Piece(text, (), prompt=tuple(scores))

    def take(self, log_probs: Sequence[float], *, version: str, done: bool) -> Piece | None:
        """Take in a round that `completion` has already; return what may be told now, if anything.

        log_probs: of its tokens. The last piece has a finish reason.
        """
        self.version = version
        output, top = self.completion.output_ids, self.job.top_logprobs
        first = len(output) - len(log_probs)
        stops = (at for at in range(first, len(output)) if output[at] in self.job.stop_token_ids)
        stop_at = next(stops, None)
        text = self._stream.push(output[first:stop_at])
        for at, log_prob in enumerate(log_probs, first):
            likeliest: tuple[tuple[int, float], ...] = ()
            if top > 0:
                ids, values = self.completion.topk_ids[at], self.completion.topk_log_probs[at]
                likeliest = tuple(zip(ids[:top], values[:top], strict=True))
            self._held.append(TokenScore(output[at], log_prob, likeliest))
        keep = None if stop_at is None else stop_at + 1
        if self._stream.stop is not None:
            keep = max(self._stream.stop.tokens, self._sent)
        if keep is not None:
            del output[keep:]
            del self._held[keep - self._sent :]
            self.completion.ended = False
            return self.end("stop", text)
        if done:
            return self.end("stop" if self.completion.ended else "length", text)
        if self.job.stops and self._stream.holds:
            return Piece(text, ()) if text else None
        held, self._held = tuple(self._held), []
        self._sent += len(held)
        return Piece(text, held) if text or held else None

    def end(self, reason: str, text: str = "") -> Piece:
        """The last piece: `text` and all that was held back."""
        completion = self.completion
        speculation = Served(
            route=self.job.route,
            version=self.version,
            rounds=completion.rounds,
            drafted=completion.drafted,
            accepted=sum(step.accepted for step in completion.steps),
            tested=completion.tested,
            acceptance=completion.acceptance_total,
        )
        return Piece(text + self._stream.flush(), tuple(self._held), reason, speculation)
