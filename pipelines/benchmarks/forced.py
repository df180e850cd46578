"""Acceptance that is given: what speculation yields at a rate that no draft had to be trained for.

Models of random weights agree on nothing, and how often a drafter is right is another question than
what a round costs. So here a proposal is accepted with a chance that is given, independently of all
others, by the very rule that serves: its acceptance tests are given numbers that decide them, and
all its arithmetic is done. The answers are garbage with real costs; tau is that of theory,
(1 - a^(gamma + 1)) / (1 - a). For sampling at a temperature above 0 and without cuts, where every
token has some probability.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from draftkit.theory.verification import (
    SAMPLED_MODES,
    VERIFIERS,
    Verification,
    speculative_sampling,
)

GIVEN = "given"  # the verification that `acceptance_given` adds to the exact ones


class GivenAcceptance:
    """Speculative sampling that accepts each proposal with chance `rate`: a `Verifier`.

    The rate lies on the device, in one place, so that compiled and captured code serves all rates.
    """

    def __init__(self, device: torch.device) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, *, accept_uniform: Tensor, **others: Any) -> Verification:
        """`speculative_sampling` with tests u q(x) < p(x) that u = 0 passes and u = inf fails."""
        passes = accept_uniform < self.rate
        decided = torch.where(passes, 0.0, math.inf)
        return speculative_sampling(accept_uniform=decided, **others)


@contextmanager
def acceptance_given(
    verifier: GivenAcceptance, rate: float, *, assisted: bool = False
) -> Iterator[str]:
    """Let decoders that are made inside verify by `verifier` at `rate`; yields the rule's name.

    assisted: the same for Hugging Face's assisted generation, where it samples.
    """
    verifier.rate.fill_(rate)
    with (
        patch.dict(VERIFIERS, {GIVEN: verifier}),
        patch.dict(SAMPLED_MODES, {GIVEN: SAMPLED_MODES["speculative"]}),
        assistance_given(rate) if assisted else nullcontext(),
    ):
        yield GIVEN


@contextmanager
def assistance_given(rate: float) -> Iterator[None]:
    """Let Hugging Face accept each proposal of an assistant with chance `rate`.

    Its rule keeps a proposal while r <= p(x)/q(x), r drawn by `torch.rand_like`: here r is 0 or
    infinite. Raises AttributeError where a version of transformers has no such rule.
    """
    import transformers.generation.utils as generation

    rule, draw = generation._speculative_sampling, torch.rand_like

    def lottery(ratio: Tensor) -> Tensor:
        return torch.zeros_like(ratio).masked_fill(draw(ratio) >= rate, math.inf)

    def decided(*arguments: Any, **options: Any) -> Any:
        with patch.object(torch, "rand_like", lottery):
            return rule(*arguments, **options)

    with patch.object(generation, "_speculative_sampling", decided):
        yield
