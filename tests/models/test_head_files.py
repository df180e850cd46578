"""draftkit's heads propose what the formulas of the format say, written apart from them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.config import DraftConfig, HardwareConfig, SamplingConfig, TargetConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import drafting
from draftkit.evaluation.alpha import score_drafts
from draftkit.models.loading import Target, load_draft, load_target
from tests.engines.counts import accepted_by_pass
from tests.engines.heads import Head, features_of, fitted, parallel, proposals, rounds
from tests.engines.pairs import EMBEDDED, text_rows
from tests.records import records_of

PROMPTS, LENGTH, TOKENS, GAMMA = 6, 12, 24, 3
GREEDY = SamplingConfig(temperature=0.0)


@cache
def owner() -> Target:
    hardware = HardwareConfig(device="cpu", dtype="float32")
    return load_target(TargetConfig(path=str(EMBEDDED)), hardware, probed=False)


@cache
def heads() -> dict[str, Head]:
    """Of some of the target's ids, in both modes."""
    model, rows = owner().adapter.model, text_rows(24)[8:]
    ids = rows.flatten().unique()
    head = fitted(model, rows, ids=ids, wide=256)
    return {
        "eagle3": head,
        "p-eagle": parallel(head, features_of(model, rows)[0], token=4095),
    }


@pytest.mark.parametrize("name", ["eagle3", "p-eagle"])
def test_a_head_from_elsewhere_accepts_what_the_formulas_say(tmp_path: Path, name: str) -> None:
    """In our decoder and in what scored texts predict."""
    target, head = owner(), heads()[name]
    draft = load_draft(DraftConfig(path=str(head.write(tmp_path))), target)
    prompts = text_rows(PROMPTS)[:, :LENGTH].tolist()
    options: dict[str, Any] = {"sampling": GREEDY, "seed": 0}
    requests = make_requests(prompts, max_new_tokens=TOKENS, gamma=GAMMA, **options)
    made = decode(
        target.adapter, [*requests], eos_token_ids=(), batch_size=4, proposer=drafting(draft)
    )
    expected = []
    for one in made:
        text = torch.tensor([*one.prompt_ids, *one.output_ids])
        features, _ = features_of(target.adapter.model, text[None])
        ids = proposals(head, text, features[0], GAMMA)
        # Our rounds begin before the first token of an answer.
        end = len(text) - 1
        counts = rounds(ids, text.tolist(), begin=LENGTH - 1, end=end, capped=True)
        expected.append(counts)
        assert accepted_by_pass(one, limit=TOKENS, ends=(), capped=True) == counts
    assert sum(map(sum, expected)) > PROMPTS
    totals = score_drafts(
        target.adapter,
        {"draft": draft},
        records_of(made, GREEDY),
        sampling=GREEDY,
        batch_size=4,
        eos_token_ids=(),
        blocks=GAMMA,
    )["draft"]
    passes = totals.tokens_a_pass("alpha", GAMMA).counts
    assert passes.tolist() == pytest.approx([len(counts) for counts in expected])
