"""The answers that are being decoded: jobs join, rounds bring them on, and they end.

One thread uses it, between whose calls nothing else touches the decoder. What a round brings
goes to listeners, counts and the recorder. Knows no queue and no drafters.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import record
from draftkit.decoding.results import RoundResult
from draftkit.decoding.state import Request
from draftkit.models.adapter import Adapter
from draftkit.serving.answers import Answer
from draftkit.serving.jobs import Counters, Piece, TokenScore
from draftkit.serving.recorder import Recorder
from draftkit.theory.warping import promote

SCORED = 256  # tokens of a prompt whose logits are there at once
log = logging.getLogger(__name__)


class Rows:
    """The running answers by slot of `decoder`; see the module's docstring."""

    def __init__(self, decoder: Decoder, recorder: Recorder, *, gamma: int) -> None:
        self.decoder = decoder
        self.errors_in_a_row = 0  # rounds
        self._recorder = recorder
        self._gamma = gamma
        self._running: dict[int, Answer] = {}
        self._counters = Counters()
        self._counting = threading.Lock()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def answers(self) -> list[Answer]:
        return list(self._running.values())

    def counters(self) -> Counters:
        """What has been counted here, as it is now. For any thread."""
        with self._counting:
            return copy.deepcopy(self._counters)

    def join(self, answer: Answer) -> None:
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
                return self.finish(answer, answer.end("length"))
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
            self.finish(answer, answer.end("error"))
            return
        self._running[slot] = answer

    def end(self, reason_of: Callable[[Answer], str | None]) -> None:
        """End the answers that have a reason, before their time."""
        ending = [(s, a, reason) for s, a in self._running.items() if (reason := reason_of(a))]
        for slot, answer, reason in ending:
            self._leave(slot)
            self.finish(answer, answer.end(reason))

    def round(self) -> None:
        """Bring all on by a round; where that fails, all that run end as "error"."""
        started = time.monotonic()
        try:
            results = self.decoder.round()
            seconds = time.monotonic() - started
            rows = sum(len(result.slots) for result in results)
            for result in results:
                self._take(result, seconds / rows)
            self.errors_in_a_row = 0
        except Exception:
            log.exception("%d answers end by an error", len(self))
            self._counters.errors += 1
            self.errors_in_a_row += 1
            self.end(lambda _: "error")

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self.decoder.leave([slot])

    def _take(self, result: RoundResult, seconds: float) -> None:
        """Bring a group's round to its answers; `seconds` is each row's share of the time."""
        record({slot: self._running[slot].completion for slot in result.slots}, result)
        log_probs = result.target_log_probs.tolist()
        for row, slot in enumerate(result.slots):
            answer, version = self._running[slot], result.proposer_version
            scores = log_probs[row][: result.committed[row]]
            piece = answer.take(scores, version=version, done=result.done[row])
            self._count_round(answer, result, row, seconds)
            if piece is not None and piece.finish_reason is None:
                self._tell(answer, piece)
            elif piece is not None:
                self._leave(slot)
                self.finish(answer, piece)

    def _count_round(self, answer: Answer, result: RoundResult, row: int, seconds: float) -> None:
        drafted, tested = result.lengths[row], result.tested[row]
        accepted = answer.completion.steps[-1].accepted
        with self._counting:
            self._counters.drafts += drafted > 0
            by_position = {i: int(i < accepted) for i in range(drafted)}
            self._counters.accepted_per_position.update(by_position)
            counts = self._counters.of(answer.drafter)
            counts.rounds += 1
            counts.drafted += drafted
            counts.accepted += accepted
            counts.tested += tested
            counts.acceptance += sum(result.acceptance[row, :tested].tolist())
            counts.seconds += seconds

    def finish(self, answer: Answer, piece: Piece) -> None:
        """Count, record and tell the end of an answer."""
        with self._counting:
            self._counters.of(answer.drafter).requests += 1
        if piece.finish_reason in ("stop", "length"):
            self._recorder.offer(answer)
        self._tell(answer, piece)

    def _tell(self, answer: Answer, piece: Piece) -> None:
        with self._counting:
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
