"""Jobs in, answers out: the target's own text, in order, whole, and none lost or mixed."""

import time
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.streaming import final_text
from draftkit.serving.answers import Draining, QueueFull
from tests import tiny
from tests.serving.running import GREEDY, TARGET, answers, ask, bytes_text, job, serving, until


def plain(prompt: list[int], new: int) -> list[int]:
    """Hugging Face's own greedy text of the target, in float32."""
    tokens = torch.tensor([prompt])
    made = TARGET.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False
    )
    return made[0, len(prompt) :].tolist()


PROMPTS = tiny.prompts([5, 17, 1, 9, 30, 3, 12, 8, 2, 21])
LENGTHS = [12, 5, 20, 1, 9, 16, 3, 14, 7, 11]
OWN = [plain(prompt, new) for prompt, new in zip(PROMPTS, LENGTHS, strict=True)]


def test_greedy_answers_are_the_targets_whoever_joins_and_leaves() -> None:
    with serving(slots=3) as engine:
        jobs = [job(p, n, sampling=GREEDY) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
        clients = answers(engine, *jobs)
        counters = engine.counters()
    assert [client.ids for client in clients] == OWN
    # Random prompts: some end inside a character, and then it is the answer's.
    before = [len(final_text(prompt, bytes_text)) for prompt in PROMPTS]
    texts = [bytes_text(prompt + ids) for prompt, ids in zip(PROMPTS, OWN, strict=True)]
    expected = [text[count:] for text, count in zip(texts, before, strict=True)]
    assert [client.text for client in clients] == expected
    assert {client.reason for client in clients} == {"length"}
    (tally,) = counters.drafters.values()
    assert tally.requests == len(jobs)
    assert counters.generated_tokens == tally.tokens == sum(LENGTHS)
    assert counters.prompt_tokens == sum(map(len, PROMPTS))
    speculations = [client.speculation for client in clients]
    assert tally.rounds == sum(s.rounds for s in speculations)
    assert tally.drafted == sum(s.drafted for s in speculations)
    assert tally.accepted == sum(s.accepted for s in speculations) > 0
    by_position = counters.accepted_per_position
    assert by_position[0] >= by_position[max(by_position)] > 0
    assert sum(by_position.values()) == tally.accepted
    assert tally.tested == sum(s.tested for s in speculations)
    assert tally.acceptance == pytest.approx(sum(s.acceptance for s in speculations))
    assert 0 < tally.acceptance <= tally.tested


@pytest.mark.parametrize(("proposer", "adapts"), [("hybrid", False), ("sampled", True)])
def test_a_hybrid_of_two_numbers_keeps_them(proposer: str, adapts: bool) -> None:
    with serving(adapts=True, proposer=proposer, draft_gamma=1) as engine:
        assert (engine.decoder.gamma_policy is not None) == adapts


def test_adapting_answers_are_the_targets_and_a_seeded_one_says_the_same_in_company() -> None:
    with serving(adapts=True, slots=8) as engine:
        assert engine.decoder.gamma_policy is not None  # rounds have been measured
        assert engine.decoder.free_slots == 8
        jobs = [job(p, n, sampling=GREEDY) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
        assert [client.ids for client in answers(engine, *jobs)] == OWN
        for sampling in (SamplingConfig(temperature=2.0), SamplingConfig(temperature=2.5, top_k=9)):
            key: dict[str, Any] = {"seed": 2**64 + 5, "sampling": sampling}
            seeded = [job(PROMPTS[n], 14, row=n, **key) for n in range(3)]
            alone = [answers(engine, one)[0].ids for one in seeded]
            company = [job(prompt, 20) for prompt in PROMPTS[:4]]
            together = answers(engine, *company, *seeded)[4:]
            assert [client.ids for client in together] == alone
            again = [job(PROMPTS[0], 14, row=row, **key) for row in (0, 1)]
            first, second = answers(engine, *again)
            assert first.ids == alone[0] != second.ids
            free = answers(engine, *[job(PROMPTS[0], 14, sampling=sampling) for _ in range(3)])
            assert len({tuple(client.ids) for client in free}) == 3


def test_scores_are_the_targets_at_temperature_one() -> None:
    sampling = SamplingConfig(temperature=0.8, top_k=20, repetition_penalty=1.2)
    with serving() as engine:
        (client,) = answers(engine, job(PROMPTS[1], 15, sampling=sampling, top_logprobs=4))
    text = torch.tensor([PROMPTS[1] + client.ids])
    with torch.no_grad():
        own = TARGET.model(text).logits[0, len(PROMPTS[1]) - 1 : -1].log_softmax(-1)
    scores = [score for piece in client.pieces for score in piece.scores]
    expected = own.gather(1, torch.tensor(client.ids)[:, None])[:, 0]
    found = torch.tensor([score.log_prob for score in scores])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    best = own.topk(4)
    assert [[token for token, _ in score.top] for score in scores] == best.indices.tolist()
    values = torch.tensor([[value for _, value in score.top] for score in scores])
    torch.testing.assert_close(values, best.values, atol=1e-4, rtol=0)


def test_an_end_of_text_ends_an_answer_and_counts_as_a_token() -> None:
    own = OWN[2]
    end = own[7]
    with serving(eos=[end]) as engine:
        (client,) = answers(engine, job(PROMPTS[2], 20, sampling=GREEDY))
    assert client.ids == own[: own.index(end) + 1]
    assert client.reason == "stop"


def test_who_ignores_ends_of_text_gets_the_same_answer_and_what_follows() -> None:
    """Beside one who does not, under the same seed."""
    key: dict[str, Any] = {"seed": 3, "sampling": SamplingConfig(temperature=0.7)}
    with serving() as endless:
        (whole,) = answers(endless, job(PROMPTS[2], 40, **key))
    end = whole.ids[7]
    with serving(eos=[end]) as engine:
        requests = [job(PROMPTS[2], 40, ignores_eos=ignores, **key) for ignores in (True, False)]
        longer, own = answers(engine, *requests)
    assert (own.reason, longer.reason) == ("stop", "length")
    assert longer.ids == whole.ids
    assert own.ids == whole.ids[: whole.ids.index(end) + 1]
    found = (longer.speculation, whole.speculation)
    assert len({(one.rounds, one.accepted, one.tested) for one in found}) == 1


def test_one_prompt_is_scored_between_two_rounds() -> None:
    """Rows wait for its pass, and should not for those of all that came together."""
    scored = [job(prompt, 0, echo="") for prompt in PROMPTS[1:4]]
    with serving(started=False) as engine:
        row, *others = ask(engine, job(PROMPTS[0], 20), *scored)
        found = []
        for _ in range(3):
            engine._step()
            found.append((len(row.pieces), sum(other.ended.is_set() for other in others)))
    assert found == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_string_cuts_the_overrun_and_no_score_behind_it_was_sent(seed: int) -> None:
    """Two characters a token, so that stop strings begin and end inside of tokens and rounds."""
    sampling = SamplingConfig(temperature=2.0)

    def pairs(ids: list[int]) -> str:
        return "".join(f"{token:02x}" for token in ids if token < 256)

    with serving(slots=2, detokenize=pairs) as engine:
        (whole,) = answers(engine, job(PROMPTS[1], 30, seed=seed, sampling=sampling))
        for first in range(8, 14):
            stop = whole.text[first : first + 5]
            # The others are beginnings that never become a stop string, and hold text back.
            stops = (stop, whole.text[4:7] + "!", whole.text[20:28] + "!")
            request = job(PROMPTS[1], 30, seed=seed, sampling=sampling, stops=stops)
            (client,) = answers(engine, request)
            assert client.text == whole.text[: whole.text.index(stop)]
            assert client.reason == "stop"
            assert client.ids == whole.ids[: len(client.ids)]
            assert pairs(client.ids).startswith(client.text)
            assert not pairs(client.ids[:-1]).startswith(client.text)
            assert client.speculation.rounds <= whole.speculation.rounds
        request = job(PROMPTS[1], 30, seed=seed, sampling=sampling, stops=(whole.text[-4:] + "!",))
        (client,) = answers(engine, request)
        assert (client.text, client.ids) == (whole.text, whole.ids)
        assert client.reason == "length"


def test_a_cancelled_answer_frees_its_row_and_the_next_one_joins() -> None:
    with serving(slots=1) as engine:
        long, short = ask(engine, job(PROMPTS[0], 90), job(PROMPTS[1], 3))
        assert long.started.wait(30)
        engine.cancel([long.answer])
        engine.cancel([long.answer])
        assert long.wait().reason == "cancelled"
        assert 0 < len(long.ids) < 90
        assert short.wait().reason == "length"
        waiting = ask(engine, job(PROMPTS[0], 90), job(PROMPTS[1], 70))
        engine.cancel([long.answer, *(client.answer for client in reversed(waiting))])
        assert [client.wait().reason for client in waiting] == ["cancelled"] * 2
        assert long.reason == "cancelled"  # it has ended long ago
        until(lambda: engine.counters().running == 0)
        assert engine.counters().queued == 0
        assert engine.decoder.free_slots == 1


def test_an_answer_that_is_late_ends_whether_it_runs_or_waits() -> None:
    with serving(slots=1) as engine:
        past = time.monotonic() + 0.05
        running, waiting = ask(
            engine, job(PROMPTS[0], 90), job(PROMPTS[1], 70, deadline=time.monotonic())
        )
        assert waiting.wait().reason == "timeout"
        assert waiting.ids == []
        engine.cancel([running.answer])
        running.wait()
        (late,) = answers(engine, job(PROMPTS[0], 90, deadline=past))
        assert late.reason == "timeout"


def test_the_queue_is_bounded_and_takes_all_choices_of_a_request_or_none() -> None:
    with serving(slots=1, queue=2, started=False) as engine:
        clients = ask(engine, job(PROMPTS[0], 2), job(PROMPTS[1], 2))
        with pytest.raises(QueueFull):
            ask(engine, job(PROMPTS[2], 2), job(PROMPTS[2], 2))
        clients += ask(engine, job(PROMPTS[3], 2))
        assert engine.counters().queued == 3
        with pytest.raises(QueueFull):
            ask(engine, job(PROMPTS[2], 2))
        engine.start()
        assert {client.wait().reason for client in clients} == {"length"}


def test_waiting_jobs_join_in_the_order_in_which_they_came() -> None:
    jobs = [job(PROMPTS[n % 3], 6, sampling=GREEDY) for n in range(8)]
    heard: list[int] = []
    with serving(slots=2, started=False) as engine:
        engine.submit(jobs, [lambda _, number=n: heard.append(number) for n in range(8)])
        engine.start()
        until(lambda: set(heard) == set(range(8)))
    assert list(dict.fromkeys(heard)) == list(range(8))


def test_rows_of_a_failing_round_end_as_errors_and_others_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(slots=2) as engine:
        step, calls = TARGET.step, []

        def failing(*arguments: object, **others: object) -> object:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("the device is gone")
            return step(*arguments, **others)  # pyrefly: ignore

        monkeypatch.setattr(TARGET, "step", failing)
        jobs = [job(p, 12, sampling=GREEDY) for p in PROMPTS[:5]]
        clients = answers(engine, *jobs)
        assert [client.reason for client in clients] == ["error"] * 2 + ["length"] * 3
        assert [client.ids for client in clients[2:]] == [plain(p, 12) for p in PROMPTS[2:5]]
        assert engine.counters().errors == 1
        assert engine.healthy()
        monkeypatch.setattr(TARGET, "step", lambda *_, **__: 1 / 0)
        for _ in range(3):
            assert answers(engine, jobs[0])[0].reason == "error"
        assert not engine.healthy()
        monkeypatch.setattr(TARGET, "step", step)
        assert answers(engine, jobs[0])[0].reason == "length"
        assert engine.healthy()
    assert "the device is gone" in caplog.text
    assert not engine.healthy()


def test_an_error_between_rounds_ends_answers_and_not_the_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.drafters, "install", lambda: 1 / 0)
            assert answers(engine, job(PROMPTS[0], 5))[0].reason == "error"
        assert answers(engine, job(PROMPTS[0], 5))[0].reason == "length"
        assert engine.healthy()


def test_draining_takes_no_more_and_lets_the_rest_finish() -> None:
    with serving(slots=2) as engine:
        clients = ask(engine, *[job(p, 20, sampling=GREEDY) for p in PROMPTS[:6]])
        assert engine.drain(60)
        assert [client.reason for client in clients] == ["length"] * 6
        assert engine.draining
        with pytest.raises(Draining):
            ask(engine, job(PROMPTS[0], 2))


def test_draining_cancels_what_is_left_at_its_end() -> None:
    with serving(slots=1) as engine:
        clients = ask(engine, job(PROMPTS[0], 90), job(PROMPTS[1], 60))
        assert not engine.drain(0.0)
        assert [client.wait().reason for client in clients] == ["cancelled"] * 2


def test_stopping_leaves_nobody_waiting() -> None:
    with serving(slots=1) as engine:
        clients = ask(engine, job(PROMPTS[0], 90), job(PROMPTS[1], 60))
    assert [client.reason for client in clients] == ["cancelled"] * 2
    assert not engine.healthy()
