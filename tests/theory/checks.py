"""The named checks of a verification rule. Each raises LawBroken when its property fails.

`test_verification.py` demands them of the shipped rules over all settings; `test_mutants.py` shows
that each broken rule fails one of them.
"""

import itertools

import torch
from torch import Tensor

from draftkit.theory import noise
from draftkit.theory.verification import Verification, Verifier
from tests.theory.boxes import LARGEST
from tests.theory.laws import (
    Law,
    LawBroken,
    check_round,
    markov,
    random_logits,
    warped_table,
)

VOCAB_SIZE = 5
RATIO_RULES = ("speculative", "block")  # weigh p against q; exact match never looks at q
# name: how target and draft are served; the supports differ wherever something is cut off
WARPS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "full support": ({}, {}),
    "cold": ({"temperature": 0.3}, {"temperature": 0.3}),
    "top-k": ({"top_k": 3}, {"top_k": 2}),
    "top-p": ({"top_p": 0.8}, {"top_p": 0.7}),
    "only the draft cut": ({}, {"top_k": 2, "top_p": 0.9}),
    "greedy target": ({"temperature": 0.0}, {"temperature": 0.7}),
    "greedy both": ({"temperature": 0.0}, {"temperature": 0.0}),
}


def laws_of(warp: str, seed: int = 22) -> tuple[Law, Law]:
    """A random target and a related draft at VOCAB_SIZE under the named warp."""
    of_target, of_draft = WARPS[warp]
    target = random_logits(VOCAB_SIZE, seed)
    draft = (target + random_logits(VOCAB_SIZE, seed + 100)) / 2**0.5
    return markov(warped_table(target, **of_target)), markov(warped_table(draft, **of_draft))


def inputs_of(
    gamma: int, rows: int = 64, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor | None]:
    """A batch of random rounds over 6 tokens, with its noise."""
    generator = torch.Generator().manual_seed(11)
    shape = (rows, gamma + 1, 6)
    target_probs = torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1)
    draft_probs = torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1)
    return {
        "target_probs": target_probs.to(dtype),
        "draft_probs": draft_probs[:, :gamma].to(dtype),
        "draft_tokens": torch.randint(6, (rows, gamma), generator=generator),
        "lengths": torch.randint(gamma + 1, (rows,), generator=generator),
        "accept_uniform": torch.rand(rows, gamma, generator=generator, dtype=torch.float64),
        "next_uniform": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


def check_joint_law(verify: Verifier) -> None:
    """The joint law is the target's at gamma 2 and 3, with and without cut supports."""
    for gamma, warp in ((2, "full support"), (3, "full support"), (2, "top-p")):
        target, draft = laws_of(warp)
        check_round(verify, target=target, draft=draft, vocab_size=VOCAB_SIZE, gamma=gamma)


def argmax_of(law: Law) -> Law:
    """All probability on the most likely token of `law`."""

    def argmax(history: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(law(history).argmax(-1), VOCAB_SIZE).double()

    return argmax


def check_one_hot_law(verify: Verifier) -> None:
    """The joint law is the target's for proposals that were not sampled."""
    target, draft = laws_of("full support")
    check_round(
        verify,
        target=target,
        draft=argmax_of(draft),
        vocab_size=VOCAB_SIZE,
        gamma=3,
        one_hot=True,
    )


def stops_after_token_one(blocks: Tensor) -> Tensor:
    """A ragged number of proposals: nothing follows the first token 1; half the blocks are short.

    It looks at drafted tokens only, as a lossless stop rule must.
    """
    before = (blocks == 1).long().cumsum(-1) - (blocks == 1).long()
    return (before == 0).sum(-1)


def check_ragged_law(verify: Verifier) -> None:
    """The joint law is the target's for every number of proposals, fixed or chosen on the way."""
    target, draft = laws_of("full support")
    gamma = 3
    rules = [stops_after_token_one]
    rules += [lambda blocks, n=n: torch.full((len(blocks),), n) for n in range(gamma + 1)]
    for lengths in rules:
        check_round(
            verify,
            target=target,
            draft=draft,
            vocab_size=VOCAB_SIZE,
            gamma=gamma,
            lengths=lengths,
        )


def check_told_law(verify: Verifier) -> None:
    """A control of the instrument: a ratio rule told raw q of warped proposals must fail it."""
    target, raw = laws_of("full support")
    _, warped = laws_of("only the draft cut")
    check_round(
        verify, target=target, draft=warped, stated_draft=raw, vocab_size=VOCAB_SIZE, gamma=2
    )


def check_accepts_nothing_impossible(verify: Verifier) -> None:
    """u = 0 accepts no token with p(x) = 0, and the smallest and largest noise emits none."""
    target_probs = torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(3, 3, 4)
    draft_probs = torch.tensor([0.3, 0.3, 0.2, 0.2]).expand(3, 2, 4)
    for value in (0.0, LARGEST):
        result = verify(
            target_probs=target_probs,
            draft_probs=draft_probs,
            draft_tokens=torch.tensor([[0, 1], [3, 0], [1, 3]]),
            lengths=None,
            accept_uniform=torch.zeros(3, 2, dtype=torch.float64),
            next_uniform=torch.full((3,), value, dtype=torch.float64),
        )
        if result.accepted.tolist() != [0, 0, 1]:
            raise LawBroken(f"impossible tokens accepted: {result.accepted.tolist()}")
        if not set(result.next_token.tolist()) <= {1, 2}:
            raise LawBroken(f"impossible tokens emitted: {result.next_token.tolist()}")


ROUNDED = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])  # the law of the two checks below
NOISE_TRIED = (0.0, 0.05, 0.25, 0.55, LARGEST)


def one_round(
    verify: Verifier, target: Tensor, draft: Tensor, *, accept: float, then: float
) -> Verification:
    """Two blocks of two tokens, none of them token 0, under one law a side and one test noise."""
    return verify(
        target_probs=target.expand(2, 3, 5),
        draft_probs=draft.expand(2, 2, 5),
        draft_tokens=torch.tensor([[1, 4], [3, 2]]),
        lengths=None,
        accept_uniform=torch.full((2, 2), accept, dtype=torch.float64),
        next_uniform=torch.full((2,), then, dtype=torch.float64),
    )


def check_equal_laws(verify: Verifier) -> None:
    """Equal laws accept everything; where only rounding rejects, the correction comes from p."""
    below = torch.nextafter(ROUNDED, torch.zeros(5))
    for then in NOISE_TRIED:
        if one_round(verify, ROUNDED, ROUNDED, accept=LARGEST, then=then).accepted.min() < 2:
            raise LawBroken("a draft equal to the target is rejected")
        # p one ulp below q everywhere: rejected by u = LARGEST, with nothing left in p - q.
        token = one_round(verify, below, ROUNDED, accept=LARGEST, then=then).next_token
        uniform = torch.tensor([then, then], dtype=torch.float64)
        if not token.equal(noise.sample(probs=ROUNDED.expand(2, 5), uniform=uniform)):
            raise LawBroken(f"no fall back to p where p - q is empty: {token.tolist()}")


def check_rounding(verify: Verifier) -> None:
    """Laws one ulp apart emit no impossible token, whatever the noise."""
    below, above = (torch.nextafter(ROUNDED, torch.full((5,), end)) for end in (0.0, 1.0))
    above[0] = 0.0
    for target, draft in ((above, ROUNDED), (ROUNDED, above), (ROUNDED, below), (ROUNDED, ROUNDED)):
        for accept, then in itertools.product(NOISE_TRIED, NOISE_TRIED):
            if (one_round(verify, target, draft, accept=accept, then=then).next_token == 0).any():
                raise LawBroken("one ulp of difference emits an impossible token")


def adversarial_tables(vocab_size: int = 16) -> tuple[Tensor, Tensor]:
    """Target and draft [V, V, V] float32 whose contexts range from near-disjoint to near-equal.

    By the sum of the last two tokens: the draft is close, nearly equal, cut to 3 tokens, an
    unrelated law, or the reversed target.
    """
    target = random_logits(vocab_size, 21, spread=1.5)
    unrelated = random_logits(vocab_size, 22, spread=1.5)
    kinds = [
        (target + 0.4 * unrelated).softmax(-1),
        (target + 0.1 * unrelated).softmax(-1),
        warped_table(unrelated, top_k=3),
        unrelated.softmax(-1),
        (-target).softmax(-1),
    ]
    token = torch.arange(vocab_size)
    kind = (token[:, None] + token) % len(kinds)
    draft = torch.stack(kinds).gather(0, kind[None, :, :, None].expand(1, *target.shape))[0]
    return target.softmax(-1).float(), draft.float()


def small_tables() -> tuple[Tensor, Tensor]:
    """Target and draft over 4 tokens: small cells are where reused noise shows."""
    return random_logits(4, 31, spread=1.0).softmax(-1), random_logits(4, 32, spread=1.0).softmax(
        -1
    )
