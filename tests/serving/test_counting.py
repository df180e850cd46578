"""Counts add up by route and version, and a snapshot stays as it was."""

from draftkit.serving.counting import Counting


def test_rounds_and_requests_add_up_under_their_route_and_version() -> None:
    counting = Counting()
    key = ("default", "v1")
    for drafted, accepted in ((3, 2), (0, 0), (4, 4)):
        counting.round(
            key,
            drafted=drafted,
            accepted=accepted,
            tested=min(drafted, accepted + 1),
            acceptance=0.5 * accepted,
            seconds=0.25,
        )
        counting.tokens(key, accepted + 1)
    counting.request(key)
    counting.request(("code", "v2"))
    before = counting.drafters()
    tally = before[key]
    assert (tally.requests, tally.tokens, tally.rounds, tally.drafts) == (1, 9, 3, 2)
    assert (tally.drafted, tally.accepted, tally.tested) == (7, 6, 7)
    assert tally.accepted_per_position == (2, 2, 1, 1)
    assert (tally.acceptance, tally.seconds) == (3.0, 0.75)
    counting.request(key)
    assert before[key] == tally
    counting.prompt_tokens, counting.errors = 5, 1
    whole = counting.snapshot(swaps=1, refused=2, swap_seconds=0.5, records_dropped=3)
    assert whole.drafters[key].requests == 2
    assert whole.drafters["code", "v2"].requests == 1
    assert (whole.prompt_tokens, whole.generated_tokens, whole.errors) == (5, 9, 1)
    assert (whole.swaps, whole.refused_versions, whole.records_dropped) == (1, 2, 3)
    assert whole.last_swap_seconds == 0.5
