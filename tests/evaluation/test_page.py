"""The page says what the summaries say, whoever wrote what they hold, and follows its rule."""

import html
import re

import pytest

from draftkit.evaluation.page import AFTER, COLOURS, Figure, as_html, as_markdown, decision_page
from draftkit.templates import interval, signed
from tests.evaluation.test_report import estimate, summary, timed_way

EVIL = '<script src="https://example.com">|`\n</script>'
LOADS = re.compile(r"<script|<link|<img|<iframe|@import|url\((?!#)|https?:|\bsrc=|href=\"(?!#)")
TRAINED = {
    **{"seconds": 126.0, "tokens": 586_549, "steps": 390, "divergence": "forward_kl"},
    **{"source": "fixed", "tokens_per_second": 5623.4, "peak_memory_bytes": 2_623_750_144},
}
TRACE = {
    "counts": "3 tokens in 1 rounds, 1 of 2 accepted",
    "prompt": "Once",
    "rounds": [{"accepted": 1, "proposed": 2, "parts": [["accepted", " upon"], ["bonus", " a"]]}],
}
TRACE["rounds"][0]["parts"].append(["rejected", " time"])
PROVENANCE = {"git_commit": "2e57ce2f", "hardware": {"cores": 2}, "argv": ["distill.py", "seed=1"]}


def part(name, alpha, tokens=0.5):
    return {
        "part": name,
        "tokens": tokens,
        "alpha": estimate(alpha),
        "lost": estimate(tokens * (1 - alpha)),
    }


def draft(alpha, temperature=1.0):
    numbers = [str(number) for number in range(1, 7)]
    return summary(alpha) | {
        "temperature": temperature,
        "plain_step_seconds": 0.0055,
        "acceptance_per_position": [0.61, 0.33, 0.2, 0.1],
        "speedup_by_k": {n: 1.2 + int(n) / 11 for n in numbers},
        "acceptance_length_by_k": {n: estimate(1 + int(n) / 7) for n in numbers},
        "alpha_by_position": [0.7, 0.6, 0.5, 0.4, 0.3, 0.2],
        "alpha_given_chain": [0.7, 0.65, 0.6, 0.5, 0.4, None],
        "lost": {
            "entropy": [part("under 0.5", alpha + 0.05), part("2 to 3", alpha - 0.05)],
            "position": [part("1 to 8", alpha)],
            "category": [part("code", alpha), part("prose", alpha)],
        },
    }


def judged(*, before=True, temperatures=(1.0,), **changes):
    """A summary of an evaluation as `evaluate` leaves it."""
    ways = {"prompt_lookup": timed_way(1.13), "drafter": timed_way(1.27)}
    ways["hybrid"] = timed_way(1.38, 3)
    over = {"prompt_lookup": estimate(1.16)}
    more = {}
    if before:
        ways["before"] = timed_way(0.87)
        over = {"before": estimate(1.46), **over}
        keys = ("alpha", "alpha_greedy_draft", "alpha_exact_match", "acceptance_length")
        more = {f"{key}_gain": estimate(0.135) for key in keys} | {"before": draft(0.654)}
    more |= {"ways": ways, "best_of": "hybrid", "use": "hybrid", "speedup_over": over}
    by_temperature = {f"{one:g}": draft(0.789, one) | more for one in temperatures}
    first = next(iter(by_temperature.values()))
    return {**first, "kind": "plain", "by_temperature": by_temperature} | changes


def without_intervals(value):
    """The same of too few documents."""
    if isinstance(value, dict):
        few = {"ci95": None} if "ci95" in value else {}
        return {key: without_intervals(inner) for key, inner in value.items()} | few
    return [without_intervals(one) for one in value] if isinstance(value, list) else value


def whole(summary, **more):
    given = {"name": "chats", "traces": [TRACE], "provenance": PROVENANCE} | more
    page = decision_page(summary, **given)
    return as_html(page), as_markdown(page)


def bare(page):
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def test_every_number_on_the_page_is_the_summarys():
    one = judged()
    page, short = whole(one, trained=TRAINED)
    way = one["ways"]["hybrid"]["speedup"]["end_to_end"]
    numbers = [
        "DEPLOY",
        *("End-to-end speedup 1.59 [1.52, 1.66] lies above 1.", "a CPU, 2 cores"),
        *("temperature 1, top-k 20, top-p 0.95, batch 1", "96 prompts of 28 documents"),
        f"alpha {signed(one['alpha_gain'])}",
        *(interval(each["speedup"]["end_to_end"], 2) for each in one["ways"].values()),
        *(interval(row["acceptance_length"], 2) for row in one["engines"]),
        *(interval(row["alpha"]) for rows in one["lost"].values() for row in rows),
        *(interval(row["lost"]) for rows in one["lost"].values() for row in rows),
        *("5.50 ms", "proposal costs 0.181", "a round 1.07", "all else 0.12", "be 2.60 times"),
        *("2.1 minutes", "586,549 tokens in 390 steps", "5,623 tokens a second", "2.62 GB"),
        *("69 tokens a second in place of 50", "3 proposals a round"),
    ]
    assert [number for number in numbers if number not in bare(page)] == []
    assert [number for number in numbers if number not in short] == []
    large = re.findall(r'"number">([^<]*)</span> <span class="interval">([^<]*)<', page)
    assert [f"{number[:-1]} {ends}" for number, ends in large] == [
        interval(way, 2),
        interval(one["speedup_over"]["before"], 2),
    ]
    assert "Token by token" not in short  # a trace has colours and no Markdown
    assert page.count("<svg") == 2


def test_what_is_folded_has_all_temperatures_and_where_numbers_come_from():
    page, short = whole(judged(temperatures=(0.0, 0.7, 1.0)))
    _, numbers, provenance = map(bare, page.split("<details>"))
    for temperature in ("0", "0.7", "1"):
        assert f"temperature {temperature}, batch 1" in numbers
    for words in ("git_commit 2e57ce2f", "hardware.cores 2", "distill.py seed=1"):
        assert words in provenance
        assert words not in short
    assert bare(page).count("drafter + prompt lookup *") == 3


CASES = {
    "of a training": judged(),
    "of too few documents": without_intervals(judged()),
    "of a given drafter": judged(before=False),
    "of a parallel drafter": judged(kind="pard"),
    "greedy": judged(temperatures=(0.0,)),
    "at several temperatures": judged(temperatures=(0.2, 1.0)),
    "that loses": judged(verdict="do_not_deploy", use="sampled"),
    "of a proposer without a drafter": {
        **{key: one for key, one in judged(before=False).items() if key != "engines"},
        **{"use": "prompt_lookup", "lost": {}, "speedup_over": {}, "best_of": "none"},
    },
}
del CASES["of a proposer without a drafter"]["speedup_by_k"]


@pytest.mark.parametrize("case", CASES)
def test_every_summary_has_its_page_that_needs_nothing_from_outside(case):
    one = CASES[case]
    page, short = whole(one)
    assert not LOADS.search(page)
    assert len(page) < 2_000_000
    assert one["reason"][1:] in bare(page)
    assert one["reason"][1:] in short
    assert ("In your engine" in page) == ("engines" in one)
    assert ("Where acceptance is lost" in page) == bool(one["lost"])
    assert ("How many proposals" in page) == ("speedup_by_k" in one)
    assert not re.search(r"\bnan\b|None|\binf\b|Undefined", short)
    answers = page.count('class="answer"')
    assert answers == (2 if one["speedup_over"] else 1)
    if case == "of too few documents":
        assert bare(page).count("no interval: too few documents") == 2
        assert "nothing follows" in short


def test_the_second_answer_is_about_what_there_was_before():
    assert "over the one it started from" in bare(whole(judged())[0])
    alone = bare(whole(judged(before=False))[0])
    assert "over prompt lookup, which copies from the text and is free" in alone
    assert "1.16× [1.15, 1.17]" in alone


def lost(summary, by, *rows):
    return summary | {"lost": summary["lost"] | {by: [part(*row) for row in rows]}}


def even(**changes):
    """Where nothing stands out."""
    one = judged(**{"best_gamma": 4} | changes)
    return lost(one, "entropy", ("under 0.5", 0.789), ("2 to 3", 0.78))


def gained(*factors):
    return summary(0.789)["speedup"] | {"predicted_by_gamma": [*factors]}


# alpha over all is 0.789 [0.777, 0.801]; intervals of parts reach 0.0123 to either side
REMEDIES = {
    "no remedy that is cheaper": (even(), "A bigger drafter:"),
    "fewer proposals": (
        even(best_gamma=2, speedup=gained(1, 1.2, 1.43, 1.41, 1.4)),
        "Fewer proposals: 2 a round are computed to give a speed-up of 1.43, the 4 in use 1.40.",
    ),
    "none at all": (
        even(best_gamma=0, speedup=gained(1, 0.9, 0.88, 0.85, 0.8)),
        "Not by itself: plain decoding is computed to be faster than rounds of this drafter, "
        "whatever their number of proposals. With 4 proposals a round they have 0.80 of its speed.",
    ),
    "proposals that are hardly too many": (
        even(best_gamma=2, speedup=gained(1, 1.2, 1.42, 1.41, 1.4)),
        "A bigger drafter:",
    ),
    "an unsure target": (
        lost(even(), "entropy", ("under 0.5", 0.9), ("3 and more", 0.76)),
        "A lower temperature, where the task allows it: alpha is 0.760 [0.748, 0.772] at the "
        "target's entropy, nats 3 and more, and 0.789 [0.777, 0.801] over all.",
    ),
    "an unsure target, greedy": (
        lost(even(temperatures=(0.0,)), "entropy", ("under 0.5", 0.9), ("3 and more", 0.76)),
        "A bigger drafter:",
    ),
    "a target that is sure": (
        lost(even(), "entropy", ("0.5 to 1", 0.7), ("3 and more", 0.79)),
        "A bigger drafter:",
    ),
    "a category": (
        lost(even(), "category", ("code", 0.9), ("prose", 0.76)),
        "More data like it: alpha is 0.760 [0.748, 0.772] at category of the prompt prose",
    ),
    "a category whose interval meets": (
        lost(even(), "category", ("code", 0.9), ("prose", 0.77)),
        "A bigger drafter:",
    ),
    "a stretch of the answer": (
        lost(even(), "position", ("1 to 8", 0.9), ("9 to 32", 0.5)),
        "More data like it: alpha is 0.500",
    ),
    "too few documents": (without_intervals(even()), "Of so few documents nothing follows."),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_the_sentence_that_follows_is_the_cheapest_remedy_by_the_rule_beside_it(case):
    one, words = REMEDIES[case]
    lost = as_markdown(decision_page(one, name="chats")).partition("acceptance is lost\n\n")[2]
    assert lost.startswith(words)
    rule = lost[lost.index("The advice above") :]
    assert (
        rule.index("Fewer") < rule.index("lower temp") < rule.index("More") < rule.index("bigger")
    )


def with_words(value, words):
    """The summary with `words` behind each of its texts but those by which it is read."""
    if isinstance(value, dict):
        known = ("verdict", "use", "best_of", "proposer", "method", "mode")
        return {k: v if k in known else with_words(v, words) for k, v in value.items()}
    if isinstance(value, list):
        return [with_words(one, words) for one in value]
    return value + words if isinstance(value, str) else value


def test_what_somebody_else_wrote_is_text_and_nothing_more():
    one = with_words(judged(), EVIL)
    trace = with_words(TRACE, EVIL) | {
        "rounds": [{"accepted": 1, "proposed": 2, "parts": [["accepted", EVIL], ["bonus", EVIL]]}]
    }
    made = {"trained": with_words(TRAINED, EVIL), "provenance": {"argv": [EVIL]}}
    page = decision_page(one, name=EVIL, traces=[trace], **made)
    text = as_html(page)
    assert not re.search("<script|</script", text)
    assert bare(text).count(" ".join(EVIL.split())) == 33  # in title, sentences, tables and trace
    short = as_markdown(page)
    assert "<script" not in short
    (row,) = (line for line in short.splitlines() if "| prose" in line)
    assert row.count("|") == 6


def test_a_trace_has_a_colour_for_each_kind_and_does_not_leave_the_machine():
    page = decision_page(judged(), name="chats", traces=[TRACE])
    for kind, tag in (("accepted", "span"), ("rejected", "del"), ("bonus", "ins")):
        (part,) = (text for name, text in TRACE["rounds"][0]["parts"] if name == kind)
        assert f'<{tag} class="{kind}">{part}</{tag}>' in as_html(page)
    sent = as_html(page | {"traces": ()})
    assert "Token by token" not in sent
    assert "upon" not in bare(sent)
    assert "In your engine" in sent


def test_of_several_traces_all_but_the_first_are_folded():
    page = decision_page(judged(), name="chats", traces=[TRACE, TRACE | {"prompt": "Twice"}])
    text = as_html(page)
    assert text.count('<ol class="trace">') == 2
    before, _, folded = text.partition("<details><summary><h2>Token by token: other texts")
    assert ("Once" in before, "Twice" in before) == (True, False)
    assert "Twice" in folded.partition("</details>")[0]


def drawn(words="a line"):
    def draw(axes):
        axes.plot([0, 1], [0, 1], color=AFTER, marker="o", label="measured")
        axes.set(xlabel="x", ylabel="y")
        axes.legend()

    return Figure(draw, words)


def test_a_figure_follows_the_colours_of_the_page_and_its_text_stays_text():
    svg = drawn().svg
    assert "var(--after)" in svg
    assert "currentColor" in svg
    assert not [colour for colour in COLOURS if colour in svg]
    assert re.search("<text[^>]*>measured</text>", svg)


def test_two_figures_share_no_name():
    names = [set(re.findall(r'\bid="([^"]*)"', drawn(words).svg)) for words in ("one", "two")]
    assert names[0]
    assert not names[0] & names[1]
    assert drawn("one").svg == drawn("one").svg
