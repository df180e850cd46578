"""A round's numbers, as answers and records need them: lists on the host.

Knows no jobs and no text.
"""

from collections.abc import Sequence

from draftkit.decoding.results import RoundResult
from draftkit.serving.jobs import TokenScore
from draftkit.serving.recorder import Likeliest


def round_scores(result: RoundResult, wanted: Sequence[int]) -> list[list[TokenScore]]:
    """The scores of each row's committed tokens, with as many alternatives as are `wanted`."""
    tokens, log_probs = result.tokens.tolist(), result.target_log_probs.tolist()
    most = max(wanted, default=0)
    alternatives = None
    if most > 0 and result.topk_ids is not None and result.topk_log_probs is not None:
        ids, values = result.topk_ids[..., :most].tolist(), result.topk_log_probs[..., :most]
        alternatives = ids, values.tolist()
    scores = []
    for row, (count, width) in enumerate(zip(result.committed, wanted, strict=True)):
        tops: list[tuple[tuple[int, float], ...]] = [()] * count
        if width > 0 and alternatives is not None:
            pairs = zip(*(part[row][:count] for part in alternatives), strict=True)
            tops = [tuple(zip(i[:width], v[:width], strict=True)) for i, v in pairs]
        own = zip(tokens[row][:count], log_probs[row][:count], tops, strict=True)
        scores.append([TokenScore(*score) for score in own])
    return scores


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
