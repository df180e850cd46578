"""One answer while it is decoded: what it has so far, what of it may be told, and how it ends.

Knows no decoder and no threads; a round's numbers come in, pieces go out.
"""

from collections.abc import Sequence

from draftkit.decoding.generation import Completion
from draftkit.decoding.streaming import Decode, TextStream, final_text
from draftkit.online.buffer import Served
from draftkit.serving.jobs import DrafterKey, Job, Listener, Piece, TokenScore


class Answer:
    """A job on its way through the decoder.

    Scores of tokens are held back as long as text is: a stop string may begin in it, and then its
    tokens are no part of the answer. Raises ValueError for an empty stop string.
    """

    def __init__(self, job: Job, listener: Listener, *, decode: Decode, seed: int) -> None:
        self.job = job
        self.listener = listener
        self.seed = seed
        self.is_cancelled = False  # it ends at the next round
        self.completion = Completion(list(job.prompt_ids))
        self.version = ""  # of the drafter that proposed last
        self._decode = decode
        self._stream = TextStream(decode, job.stops, job.prompt_ids if job.continues else ())
        self._held: list[TokenScore] = []
        self._sent = 0  # scores

    @property
    def drafter(self) -> DrafterKey:
        return self.job.route, self.version

    def echo(self, scores: Sequence[TokenScore]) -> Piece:
        """The prompt, said before the answer."""
        text = self.job.echo or final_text(list(self.job.prompt_ids), self._decode)
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
            likeliest: Sequence[tuple[int, float]] = ()
            if top > 0:
                ids = self.completion.topk_ids[at][:top]
                values = self.completion.topk_log_probs[at][:top]
                likeliest = list(zip(ids, values, strict=True))
            self._held.append(TokenScore(output[at], log_prob, tuple(likeliest)))
        keep = None if stop_at is None else stop_at + 1
        if (stop := self._stream.stop) is not None:
            keep = max(stop.tokens, self._sent)
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
