"""The engine: jobs in, pieces of answers out, by continuous batching on a thread of its own.

Between two rounds of the decoder new weights are installed, rows that were cancelled or are late
leave, and waiting jobs join in the order in which they came. What a round brings goes to the
listeners of answers, on the engine's thread, to counts and to the recorder. Knows no HTTP; text
only through `detokenize`.

A seeded job keeps `decode.gamma`, so that in float32 its answer does not depend on the rows beside
it; all others propose as many tokens as pay at the moment.
"""

import copy
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from draftkit.config import DecodeConfig, ServeConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import record
from draftkit.decoding.results import RoundResult
from draftkit.decoding.state import Request
from draftkit.decoding.streaming import Detokenize
from draftkit.evaluation.costs import measured_policy
from draftkit.models.adapter import Adapter
from draftkit.serving.answers import (
    Answer,
    Counters,
    Draining,
    Job,
    Listener,
    Piece,
    QueueFull,
    TokenScore,
)
from draftkit.serving.drafters import Drafters
from draftkit.serving.protocol import TOP_LOGPROBS
from draftkit.serving.recorder import Recorder
from draftkit.theory.warping import promote

IDLE_SECONDS = 1.0  # after which an engine without jobs shows that it lives
STALLED_SECONDS = 120.0  # a round of compiled code may have to be compiled first
MOST_ERRORS = 3  # rounds in a row that may fail
LEAVING_SECONDS = 5.0  # for answers that are cancelled at the end
ERROR_SECONDS = 0.1  # until the next try
SEEDS = 1 << 63
SCORED = 256  # tokens of a prompt whose logits are there at once
log = logging.getLogger(__name__)


class Engine:
    """Owns the decoder of `target`; see the module's docstring.

    `detokenize` is the text of ids, special tokens left out. What comes before "The thread" may be
    called from any thread; `submit`, `cancel`, `counters` and `healthy` wait for no round.
    """

    def __init__(
        self,
        target: Adapter,
        drafters: Drafters,
        *,
        detokenize: Detokenize,
        eos_token_ids: Sequence[int] = (),
        serve: ServeConfig,
        decoding: DecodeConfig,
        recorder: Recorder,
    ) -> None:
        self.drafters = drafters
        self.recorder = recorder
        self.slots = serve.slots
        self._serve = serve
        self._gamma = decoding.proposals
        # A policy knows one number: a hybrid that has two keeps them.
        has_two = decoding.proposer == "hybrid" and decoding.draft_gamma is not None
        self._adapts = serve.adapts and self._gamma > 0 and not has_two
        self._detokenize = detokenize
        if 0 < recorder.top_k < TOP_LOGPROBS:
            raise ValueError(
                f"online.buffer.top_k must be 0 or at least {TOP_LOGPROBS}, got {recorder.top_k}: "
                "clients may ask for as many, and both come from one list of a round"
            )
        proposers = [route.proposer for route in drafters.routes.values()]
        contexts = [model.max_positions for model in (target, *proposers)]
        self.max_length = min(serve.max_length, *contexts)
        self.decoder = Decoder(
            target,
            slots=serve.slots,
            capacity=self.max_length + 2 * (max(decoding.proposals, decoding.tree) + 1),
            eos_token_ids=eos_token_ids,
            verification=decoding.verification,
            epsilon=decoding.epsilon,
            compiled=decoding.compile == "true",
            captured=decoding.compile in ("auto", "captured"),
            top_k=max(TOP_LOGPROBS, recorder.top_k),
        )
        drafters.attach(self.decoder)
        self._errors_in_a_row = 0  # rounds
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Answer] = deque()
        self._running: dict[int, Answer] = {}  # by slot; the thread alone changes it
        self._counters = Counters()
        self.draining = self._stopping = False
        self._beat = time.monotonic()
        self._thread: threading.Thread | None = None

    # For any thread

    def submit(self, jobs: Sequence[Job], listeners: Sequence[Listener]) -> list[Answer]:
        """Queue `jobs`, all or none; return what `cancel` takes. Pieces may come before that.

        Raises QueueFull and Draining. A job that can never be decoded ends as "error": whoever
        takes requests refuses it before.
        """
        answers = []
        for job, listener in zip(jobs, listeners, strict=True):
            seed = secrets.randbelow(SEEDS) if job.seed is None else job.seed % SEEDS
            answers.append(Answer(job, listener, detokenize=self._detokenize, seed=seed))
        with self._changed:
            if self.draining:
                raise Draining("the server is stopping and takes no more requests")
            busy = len(self._waiting) + len(self._running)
            if busy + len(jobs) > self._serve.queue + self.slots:
                raise QueueFull("the queue is full")
            self._waiting.extend(answers)
            self._changed.notify()
        return answers

    def cancel(self, answers: Iterable[Answer]) -> None:
        """End answers as "cancelled" at the next round; those that have ended are left alone."""
        with self._changed:
            for answer in answers:
                answer.is_cancelled = True
            self._changed.notify()

    def counters(self) -> Counters:
        """What it does and has done."""
        with self._changed:
            counters = copy.deepcopy(self._counters)
            counters.queued, counters.running = len(self._waiting), len(self._running)
        counters.swaps, counters.refused_versions = self.drafters.swaps, self.drafters.refused
        counters.last_swap_seconds = self.drafters.last_swap_seconds
        counters.records_dropped = self.recorder.dropped
        return counters

    def healthy(self) -> bool:
        """Whether the thread lives, makes progress, and not every round fails."""
        alive = self._thread is not None and self._thread.is_alive()
        moves = time.monotonic() - self._beat < STALLED_SECONDS
        return alive and moves and self._errors_in_a_row < MOST_ERRORS

    # Life

    def start(self) -> None:
        """Load the current drafters, measure what rounds cost, and serve from then on."""
        self.drafters.poll()
        if self._adapts:
            proposer_id = next(iter(self.drafters.routes))
            self.decoder.gamma_policy = measured_policy(self.decoder, proposer_id, self._gamma)
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.drafters.start(self._wake)
        self.recorder.start(self.counters)

    def drain(self, seconds: float) -> bool:
        """Take no more jobs, wait for those there are, and cancel what is left after `seconds`.

        Returns whether all came to their own end. The engine still runs: `stop` it.
        """
        with self._changed:
            self.draining = True
            done = self._changed.wait_for(self._is_idle, timeout=seconds)
            if not done:
                self.cancel([*self._waiting, *self._running.values()])
                self._changed.wait_for(self._is_idle, timeout=LEAVING_SECONDS)
        return done

    def stop(self) -> None:
        """Cancel what runs, and end all threads; records that wait are written."""
        with self._changed:
            self.draining = self._stopping = True
            self._changed.notify_all()
        self.drafters.stop()
        if self._thread is not None:
            self._thread.join()
        self.recorder.stop()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _is_idle(self) -> bool:
        return not self._waiting and not self._running

    # The thread

    def _run(self) -> None:
        reason = "error"  # why answers end where the thread does, for whatever cause
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                try:
                    self._step()
                except Exception:  # not of a round: those end their own rows
                    log.exception("the engine met an error between two rounds")
                    self._errors_in_a_row += 1
                    self._end(lambda _: "error")
                    with self._changed:
                        self._changed.wait(ERROR_SECONDS)
            reason = "cancelled"
        finally:
            with self._changed:
                self.draining = True  # nobody is there for new jobs
            self._end(lambda _: reason)

    def _step(self) -> None:
        """One round with all that comes before it; without rows, wait for some."""
        self.drafters.install()
        now = time.monotonic()
        self._end(lambda answer: "cancelled" if answer.is_cancelled else None)
        self._end(lambda answer: "timeout" if now >= answer.job.deadline else None)
        # The longest waiting joins first; one to be echoed is the last of them, since to score its
        # prompt takes a pass, for which all rows wait.
        echoed = False
        while self.decoder.free_slots and self._waiting and not echoed:
            self._join(self._waiting[0])
            with self._changed:  # only now, so that it is nowhere lost to view
                echoed = self._waiting.popleft().job.echo is not None
        if self._running:
            return self._round()
        with self._changed:
            self._changed.notify_all()  # who drains waits for this
            if not self._waiting and not self._stopping and not self.drafters.waits:
                self._changed.wait(IDLE_SECONDS)

    def _end(self, reason_of: Callable[[Answer], str | None]) -> None:
        """End the answers, waiting or running, that have a reason."""
        with self._changed:
            waiting = [(answer, why) for answer in self._waiting if (why := reason_of(answer))]
            for answer, _ in waiting:
                self._waiting.remove(answer)
        for answer, why in waiting:
            self._finish(answer, answer.end(why))
        for slot, answer in [*self._running.items()]:
            if why := reason_of(answer):
                self._leave(slot, answer.end(why))

    def _join(self, answer: Answer) -> None:
        """Give `answer` a slot, of which one must be free; it ends as "error" if that fails.

        What is echoed is told before, by a pass of its own.
        """
        job = answer.job
        self._counters.prompt_tokens += len(job.prompt_ids)
        try:
            if job.echo is not None:
                scores = prompt_scores(self.decoder.target, job.prompt_ids, job.top_logprobs)
                answer.listener(answer.echo(scores))
            if job.max_new_tokens == 0:
                return self._finish(answer, answer.end("length"))
            request = Request(
                prompt_ids=job.prompt_ids,
                max_new_tokens=job.max_new_tokens,
                sampling=job.sampling,
                gamma=self._gamma,
                proposer_id=job.route,
                seed=answer.seed,
                row=job.row,
                ignores_eos=job.ignores_eos,
                adapts=job.seed is None,
            )
            (slot,) = self.decoder.join([request])
        except Exception:
            log.exception("an answer cannot join and ends by an error")
            self._counters.errors += 1
            return self._finish(answer, answer.end("error"))
        self._running[slot] = answer

    def _round(self) -> None:
        """Bring all on by a round; where that fails, all that run end as "error"."""
        try:
            for result in self.decoder.round():
                self._take(result)
            self._errors_in_a_row = 0
        except Exception:
            log.exception("%d answers end by an error", len(self._running))
            self._counters.errors += 1
            self._errors_in_a_row += 1
            for slot, answer in [*self._running.items()]:
                self._leave(slot, answer.end("error"))

    def _take(self, result: RoundResult) -> None:
        """Bring a group's round to its answers, and count it."""
        record({slot: self._running[slot].completion for slot in result.slots}, result)
        log_probs = result.target_log_probs.tolist()
        for row, slot in enumerate(result.slots):
            answer, version = self._running[slot], result.proposer_version
            scores = log_probs[row][: result.committed[row]]
            piece = answer.take(scores, version=version, done=result.done[row])
            drafted, tested = result.lengths[row], result.tested[row]
            accepted = answer.completion.steps[-1].accepted
            with self._changed:
                self._counters.drafts += drafted > 0
                by_position = {i: int(i < accepted) for i in range(drafted)}
                self._counters.accepted_per_position.update(by_position)
                counts = self._counters.of(answer.drafter)
                counts.rounds += 1
                counts.drafted += drafted
                counts.accepted += accepted
                counts.tested += tested
                counts.acceptance += sum(result.acceptance[row, :tested].tolist())
            if piece is not None and piece.finish_reason is None:
                self._tell(answer, piece)
            elif piece is not None:
                self._leave(slot, piece)

    def _leave(self, slot: int, piece: Piece) -> None:
        """Free the slot of an answer whose last piece this is."""
        answer = self._running.pop(slot)
        self.decoder.leave([slot])
        self._finish(answer, piece)

    def _finish(self, answer: Answer, piece: Piece) -> None:
        """Count, record and tell the end of an answer."""
        with self._changed:
            self._counters.of(answer.drafter).requests += 1
        if piece.finish_reason in ("stop", "length"):
            self.recorder.offer(answer)
        self._tell(answer, piece)

    def _tell(self, answer: Answer, piece: Piece) -> None:
        with self._changed:
            self._counters.of(answer.drafter).tokens += len(piece.scores)
        answer.listener(piece)


@torch.inference_mode()
def prompt_scores(target: Adapter, prompt: Sequence[int], top: int) -> list[TokenScore]:
    """Each token of a text under `target`, after those before it, with the `top` likeliest."""
    tokens = torch.tensor([prompt], device=target.device)
    following = tokens[0, 1:, None]
    keep = torch.arange(len(prompt), device=target.device)[None] < len(following)
    head, scores = target.head, [TokenScore(prompt[0], None)]
    states = target.states(tokens, keep).split(SCORED)
    for part, token in zip(states, following.split(SCORED), strict=True):
        logits = promote(part if head is None else head(part))
        log_probs = logits - logits.logsumexp(-1, keepdim=True)
        likeliest = log_probs.topk(top)
        columns = (token[:, 0], log_probs.gather(-1, token)[:, 0], likeliest.indices, likeliest[0])
        for one, own, ids, values in zip(*(part.tolist() for part in columns), strict=True):
            scores.append(TokenScore(one, own, tuple(zip(ids, values, strict=True))))
    return scores
