"""One answer while it is decoded: what it has so far, what of it may be told, and how it ends.

Knows no decoder and no threads; a round's numbers come in, pieces go out.
"""

from collections.abc import Sequence

import numpy as np

from draftkit.decoding.generation import Completion
from draftkit.decoding.results import RoundResult
from draftkit.decoding.streaming import Decode, TextStream
from draftkit.serving.jobs import DrafterKey, Job, Listener, Piece, Speculation, TokenScore

Likeliest = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, log-probs [N, k], tails [N]


class Answer:
    """A job on its way through the decoder.

    Scores of tokens are held back as long as text is: a stop string may begin in it, and then its
    tokens are no part of the answer.
    """

    def __init__(
        self, job: Job, listener: Listener, *, decode: Decode, seed: int, now: float
    ) -> None:
        """`now`: by time.monotonic()."""
        self.job = job
        self.listener = listener
        self.seed = seed
        self.started = now
        self.ended: float | None = None  # unix time at which the last piece is told
        self.is_cancelled = False  # it ends at the next round
        self.records = False
        self.completion = Completion(list(job.prompt_ids))
        self.version = ""  # of the drafter that proposed last
        self.likeliest: list[Likeliest] = []  # of each round, where it is recorded
        self._stream = TextStream(decode, job.stops, job.prompt_ids if job.continues else ())
        self._held: list[TokenScore] = []
        self._sent = 0  # scores

    @property
    def drafter(self) -> DrafterKey:
        return self.job.route, self.version

    def take(self, scores: list[TokenScore], *, version: str, done: bool) -> Piece | None:
        """Take in a round that `completion` has already; return what may be told now, if anything.

        scores: of its tokens. The last piece has a finish reason.
        """
        self.version = version
        text = self._stream.push([score.token_id for score in scores])
        self._held += scores
        if (stop := self._stream.stop) is not None:
            keep = max(stop.tokens, self._sent)
            del self.completion.output_ids[keep:]
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
        speculation = Speculation(
            rounds=completion.rounds,
            drafted=completion.drafted,
            accepted=sum(step.accepted for step in completion.steps),
            tested=completion.tested,
            acceptance=completion.acceptance_total,
            version=self.version,
        )
        return Piece(text + self._stream.flush(), tuple(self._held), reason, speculation)


def round_scores(result: RoundResult, wanted: Sequence[int]) -> list[list[TokenScore]]:
    """The scores of each row's committed tokens, with as many alternatives as are `wanted`."""
    tokens, log_probs = result.tokens.tolist(), result.target_log_probs.tolist()
    most = max(wanted, default=0)
    ids, values = (
        part[..., :most].tolist() if part is not None and most > 0 else None
        for part in (result.topk_ids, result.topk_log_probs)
    )

    def top(row: int, n: int, width: int) -> tuple[tuple[int, float], ...]:
        if ids is None or values is None or width == 0:
            return ()
        return tuple(zip(ids[row][n][:width], values[row][n][:width], strict=True))

    return [
        [TokenScore(tokens[row][n], log_probs[row][n], top(row, n, width)) for n in range(count)]
        for row, (count, width) in enumerate(zip(result.committed, wanted, strict=True))
    ]


def round_likeliest(result: RoundResult) -> list[Likeliest]:
    """What the round names of the target for each row's committed tokens; it must name some."""
    ids, log_probs, tails = result.topk_ids, result.topk_log_probs, result.tail_mass
    assert ids is not None
    assert log_probs is not None
    assert tails is not None
    arrays = ids.cpu().numpy(), log_probs.float().cpu().numpy(), tails.float().cpu().numpy()
    # Copies, so that no answer keeps the numbers of all its batch mates.
    return [
        (arrays[0][row, :n].copy(), arrays[1][row, :n].copy(), arrays[2][row, :n].copy())
        for row, n in enumerate(result.committed)
    ]
