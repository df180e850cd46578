"""Deliberately broken rules: the tests of the tests.

A mutant of a module is its shipped source with one edit, so that everything else about it stays
what ships; the edit must match exactly once, or the mutant has gone stale and says so. Mutants of
the noise wrap `noise.uniform`. `test_mutants.py` names the check that must reject each of them.
"""

import inspect
from types import ModuleType

import torch
from torch import Tensor

from draftkit.theory import noise, verification


def mutate(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of `module` with `old` replaced by `new` in its source; `old` must occur once."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{source.count(old)} places to mutate for {old!r}"
    mutant = ModuleType(module.__name__ + "_mutant")
    exec(compile(source.replace(old, new), f"<mutant of {module.__name__}>", "exec"), vars(mutant))
    return mutant


# name: (what is replaced in verification.py, by what)
VERIFICATION_EDITS = {
    "accepts at equality": ("passes = drawn < ", "passes = drawn <= "),
    "inverted ratio": (
        "drawn = accept_uniform * _of_tokens(draft_law, draft_tokens)  # [B, K]\n"
        "    passes = drawn < _of_tokens(target_probs, draft_tokens)",
        "drawn = accept_uniform * _of_tokens(target_probs, draft_tokens)\n"
        "    passes = drawn < _of_tokens(draft_law, draft_tokens)",
    ),
    "correction drawn afresh from the target": (
        "excess = (target_probs - draft_probs).clamp(min=0)",
        "excess = target_probs",
    ),
    "correction drawn afresh from the draft": (
        "excess = (target_probs - draft_probs).clamp(min=0)",
        "excess = draft_probs",
    ),
    "residual of absolute differences": (
        "excess = (target_probs - draft_probs).clamp(min=0)",
        "excess = (target_probs - draft_probs).abs()",
    ),
    "residual divides by zero": (
        "torch.where(total > 0, excess / torch.where(total > 0, total, 1), target_probs)",
        "excess / total",
    ),
    "acceptance after a rejection": (
        "return flags.long().cumprod(-1).sum(-1)",
        "return flags.long().sum(-1)",
    ),
    "bonus from the wrong position": (
        "target_probs=_at(target_probs, accepted), draft_probs",
        "target_probs=_at(target_probs, accepted - (accepted == lengths).long()), draft_probs",
    ),
    "lengths ignored": ("if lengths is None:", "if True:"),
    "correction shares the noise of the tests": (
        "accepted = _leading(passes & _up_to(",
        "next_uniform = accept_uniform[:, 0]\n    accepted = _leading(passes & _up_to(",
    ),
    "block: test one context early": (
        "clamp(min=0).sum(-1)[:, 1:]",
        "clamp(min=0).sum(-1)[:, :-1]",
    ),
    "block: test one likelihood early": (
        "total = surplus + 1 - prefix[:, 1:]",
        "total = surplus + 1 - prefix[:, :-1]",
    ),
    "block: stops at the first failure": (
        "F.pad(passes * index, (1, 0)).amax(-1)",
        "_leading(passes)",
    ),
    "block: likelihood not capped": (".clamp(max=1))", ".clamp(max=1e9))"),
    "block: residual of the unscaled target": (
        "residual(target_probs=_at(scaled, accepted)",
        "residual(target_probs=_at(target_probs, accepted)",
    ),
    "match: correction drawn afresh": (
        "return _agreement(choices=choices, draft_tokens=draft_tokens, lengths=lengths)",
        "accepted = _agreement(\n"
        "        choices=choices, draft_tokens=draft_tokens, lengths=lengths\n"
        "    ).accepted\n"
        "    return Verification(\n"
        "        accepted, sample(probs=_at(target_probs, accepted), uniform=next_uniform)\n"
        "    )",
    ),
    "match: compared with the position after": (
        "(choices[:, :gamma] == draft_tokens)",
        "(choices[:, 1:] == draft_tokens)",
    ),
    "match: next token from the position before": (
        "choices.gather(1, accepted[:, None])",
        "choices.gather(1, (accepted[:, None] - 1).clamp(min=0))",
    ),
    "match: every position from the same noise": (
        "choices = sample(probs=target_probs.flatten(0, 1), uniform=uniform.flatten())",
        "uniform = uniform[:, :1].expand_as(uniform)\n"
        "    choices = sample(probs=target_probs.flatten(0, 1), uniform=uniform.flatten())",
    ),
}


def verification_mutant(name: str) -> ModuleType:
    """verification.py with the edit of that name."""
    return mutate(verification, *VERIFICATION_EDITS[name])


def tests_share_proposal_noise(*, purpose: int, **key: Tensor | int) -> Tensor:
    """Proposals and acceptance tests from the same numbers."""
    purpose = noise.DRAFT if purpose == noise.ACCEPT else purpose
    return noise.uniform(purpose=purpose, **key)


def correction_shares_proposal_noise(*, purpose: int, **key: Tensor | int) -> Tensor:
    """Proposals and correction token from the same numbers."""
    purpose = noise.DRAFT if purpose == noise.NEXT else purpose
    return noise.uniform(purpose=purpose, **key)


def correction_shares_test_noise(*, purpose: int, **key: Tensor | int) -> Tensor:
    """Acceptance tests and correction token from the same numbers."""
    purpose = noise.ACCEPT if purpose == noise.NEXT else purpose
    return noise.uniform(purpose=purpose, **key)


def keyed_by_position(
    *, seed: Tensor, row: Tensor, length: Tensor, count: int, purpose: int
) -> Tensor:
    """Noise of the absolute position: that of rejected proposals comes again in the next round."""
    columns = [
        noise.uniform(seed=seed, row=row, length=length + place, count=1, purpose=purpose)
        for place in range(count)
    ]
    return torch.cat(columns, dim=1)


def forgets_the_length(
    *, seed: Tensor, row: Tensor, length: Tensor, count: int, purpose: int
) -> Tensor:
    """The same noise in every round."""
    zero = torch.zeros_like(length)
    return noise.uniform(seed=seed, row=row, length=zero, count=count, purpose=purpose)
