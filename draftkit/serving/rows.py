"""The answers that are being decoded: jobs join, rounds bring them on, and they end.

One thread uses it, between whose calls nothing else touches the decoder. What a round brings goes
to listeners, counts, the recorder and the drafters' record of acceptance. Knows no queue.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import record
from draftkit.decoding.results import RoundResult
from draftkit.decoding.state import Request
from draftkit.serving.answers import Answer
from draftkit.serving.counting import Counting
from draftkit.serving.drafters import Drafters
from draftkit.serving.jobs import Piece
from draftkit.serving.recorder import Answered, Likeliest, Recorder
from draftkit.serving.scores import round_likeliest, round_scores

log = logging.getLogger(__name__)


class Rows:
    """The running answers by slot of `decoder`; see the module's docstring."""

    def __init__(
        self,
        decoder: Decoder,
        drafters: Drafters,
        recorder: Recorder | None,
        *,
        gamma: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decoder = decoder
        self.counting = Counting()
        self.job_seconds = 1.0  # a running mean over answers, waiting included
        self.errors_in_a_row = 0  # rounds
        self.failed_at = 0.0  # the last of them, by the clock
        self._drafters = drafters
        self._recorder = recorder
        self._records_ids = recorder is not None and recorder.top_k > 0
        self._gamma = gamma
        self._clock = clock
        self._running: dict[int, Answer] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def answers(self) -> list[Answer]:
        return list(self._running.values())

    def join(self, answer: Answer) -> None:
        """Give `answer` a slot, of which one must be free; it ends as "error" if that fails."""
        try:
            (slot,) = self.decoder.join([self._request(answer)])
        except Exception:
            self._fail([answer])
            return
        self._running[slot] = answer
        self.counting.prompt_tokens += len(answer.job.prompt_ids)

    def _request(self, answer: Answer) -> Request:
        job, seeded = answer.job, answer.job.seed is not None
        answer.records = self._recorder is not None and self._recorder.takes(job)
        return Request(
            prompt_ids=job.prompt_ids,
            max_new_tokens=job.max_new_tokens,
            sampling=job.sampling,
            gamma=self._gamma,
            proposer_id=self._drafters.choose(job.route, seeded=seeded),
            seed=answer.seed,
            row=job.row,
            adapts=not seeded,
        )

    def end(self, reasons: Mapping[int, str]) -> None:
        """End the answers of these numbers before their time, each for its reason."""
        slots = [slot for slot, answer in self._running.items() if answer.number in reasons]
        for slot in slots:
            answer = self._running[slot]
            self.finish(answer, answer.end(reasons[answer.number]))
        self._leave(slots)

    def round(self) -> None:
        """Bring all on by a round; where that fails, all that run end as "error"."""
        started = self._clock()
        try:
            results = self.decoder.round()
            seconds = self._clock() - started
            rows = sum(len(result.slots) for result in results)
            for result in results:
                self._take(result, seconds / rows)
            self.errors_in_a_row = 0
        except Exception:
            self.count_error()
            self._fail(self.answers)
            self._leave(list(self._running))

    def count_error(self) -> None:
        """One more without a round that succeeded in between."""
        self.errors_in_a_row += 1
        self.failed_at = self._clock()

    def _leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._running[slot]
        self.decoder.leave(slots)

    def _fail(self, answers: Sequence[Answer]) -> None:
        """End `answers` as "error", while an exception is at hand."""
        log.exception("%d answers end by an error", len(answers))
        self.counting.errors += 1
        for answer in answers:
            if not answer.ended:
                self.finish(answer, answer.end("error"))

    def _take(self, result: RoundResult, seconds: float) -> None:
        """Bring a group's round to its answers; `seconds` is each row's share of the time."""
        answers = [self._running[slot] for slot in result.slots]
        completions = [answer.completion for answer in answers]
        before = [(c.tested, c.acceptance_total) for c in completions]
        record(dict(zip(result.slots, completions, strict=True)), result)
        scores = round_scores(result, [answer.job.top_logprobs for answer in answers])
        likeliest: list[Likeliest] = []
        if self._records_ids and any(answer.records for answer in answers):
            likeliest = round_likeliest(result)
        version, ended = result.proposer_version, []
        for place, (slot, answer) in enumerate(zip(result.slots, answers, strict=True)):
            if answer.records and likeliest:
                answer.likeliest.append(likeliest[place])
            piece = answer.take(scores[place], version=version, done=result.done[place])
            completion, (tested, acceptance) = answer.completion, before[place]
            self.counting.round(
                (answer.job.route, version),
                drafted=result.lengths[place],
                accepted=completion.steps[-1].accepted,
                tested=completion.tested - tested,
                acceptance=completion.acceptance_total - acceptance,
                seconds=seconds,
            )
            if piece is not None and piece.finish_reason is None and not self._tell(answer, piece):
                piece = answer.end("cancelled")
            if piece is not None and piece.finish_reason is not None:
                ended.append(slot)
                self.finish(answer, piece)
        self._leave(ended)

    def finish(self, answer: Answer, piece: Piece) -> None:
        """Count, record and tell the end of an answer."""
        answer.ended = True
        completion, job = answer.completion, answer.job
        self.counting.request((job.route, answer.version))
        self.job_seconds += 0.1 * (self._clock() - answer.started - self.job_seconds)
        if job.seed is None and len(answer.versions) == 1:
            self._drafters.observe(
                job.route,
                answer.version,
                tested=completion.tested,
                acceptance=completion.acceptance_total,
            )
        whole = piece.finish_reason in ("stop", "length")
        if self._recorder is not None and answer.records and whole:
            answered = Answered(
                job=job,
                seed=answer.seed,
                output_ids=completion.output_ids,
                steps=completion.steps,
                likeliest=answer.likeliest,
                version=answer.version,
                seconds=time.time(),
            )
            self._recorder.offer(answered)
        self._tell(answer, piece)

    def _tell(self, answer: Answer, piece: Piece) -> bool:
        """Whether the listener could take `piece`; after a failure it is not called again."""
        self.counting.tokens((answer.job.route, answer.version), len(piece.scores))
        try:
            answer.listener(piece)
        except Exception:
            log.exception("a listener failed; its answer is cancelled")
            answer.listener = lambda _: None
            return False
        return True
