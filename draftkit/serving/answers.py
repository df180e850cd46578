"""One answer while it is decoded: what it has so far, what of it may be told, and how it ends.

Knows no decoder and no threads; a round's numbers come in, pieces go out.
"""

from dataclasses import dataclass, field

from draftkit.decoding.generation import Completion
from draftkit.decoding.streaming import Decode, TextStream
from draftkit.serving.jobs import Job, Listener, Piece, Speculation, TokenScore
from draftkit.serving.recorder import Likeliest


@dataclass
class Answer:
    """A job on its way through the decoder.

    Scores of tokens are held back as long as text is: a stop string may begin in it, and then its
    tokens are no part of the answer.
    """

    number: int
    job: Job
    listener: Listener
    seed: int
    stream: TextStream
    completion: Completion
    started: float  # time.monotonic()
    records: bool = False
    ended: bool = False  # the last piece has been told
    versions: list[str] = field(default_factory=list)  # of drafters, each once
    likeliest: list[Likeliest] = field(default_factory=list)  # where it is recorded
    _held: list[TokenScore] = field(default_factory=list)
    _sent: int = 0  # scores

    @property
    def version(self) -> str:
        """Of the drafter that proposed last."""
        return self.versions[-1] if self.versions else ""

    def take(self, scores: list[TokenScore], *, version: str, done: bool) -> Piece | None:
        """Take in a round that `completion` has already; return what may be told now, if anything.

        scores: of its tokens. The last piece has a finish reason.
        """
        if version not in self.versions[-1:]:
            self.versions.append(version)
        text = self.stream.push([score.token_id for score in scores])
        self._held += scores
        if (stop := self.stream.stop) is not None:
            keep = max(stop.tokens, self._sent)
            del self.completion.output_ids[keep:]
            del self._held[keep - self._sent :]
            self.completion.ended = False
            return self._last("stop", text)
        if done:
            return self._last("stop" if self.completion.ended else "length", text)
        if self.job.stops and self.stream.holds:
            return Piece(text, ()) if text else None
        return self._piece(text)

    def end(self, reason: str) -> Piece:
        """The last piece of an answer that ends before its time."""
        return self._last(reason, "")

    def _piece(self, text: str) -> Piece | None:
        scores = tuple(self._held)
        self._sent += len(scores)
        self._held = []
        return Piece(text, scores) if text or scores else None

    def _last(self, reason: str, text: str) -> Piece:
        text += self.stream.flush()
        return Piece(text, tuple(self._held), reason, self.speculation())

    def speculation(self) -> Speculation:
        """What speculation has done for it."""
        completion = self.completion
        return Speculation(
            rounds=completion.rounds,
            drafted=completion.drafted,
            accepted=sum(step.accepted for step in completion.steps),
            tested=completion.tested,
            acceptance=completion.acceptance_total,
            accept_counts=tuple(completion.accept_counts),
            version=self.version,
        )


def begin(
    number: int, job: Job, listener: Listener, *, decode: Decode, seed: int, now: float
) -> Answer:
    return Answer(
        number=number,
        job=job,
        listener=listener,
        seed=seed,
        stream=TextStream(decode, job.stops, job.prompt_ids if job.continues else ()),
        completion=Completion(list(job.prompt_ids)),
        started=now,
    )
