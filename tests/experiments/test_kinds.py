"""The table of kinds: each learns as its settings say, and its numbers stand in the right row."""

from pathlib import Path
from typing import Any

import pytest

from draftkit.config import Config, DraftConfig
from pipelines.configuration import compose_config, compose_settings
from pipelines.experiments.kinds import (
    EXPERIMENT,
    STEPS,
    TARGETS,
    Judged,
    learning,
    run,
    tables,
)
from pipelines.plan import GENERATE, lengths_of
from pipelines.product import plan
from tests import tiny


@pytest.mark.parametrize("kind", STEPS)
def test_a_kind_is_what_its_settings_make_and_learns_from_the_targets_answers(kind: str) -> None:
    expected = {"peagle": "eagle3"}.get(kind, kind)
    words = [EXPERIMENT, "target=embedded", *TARGETS["embedded"], *learning("embedded", kind)]
    made = compose_config(words)
    assert (made.draft.kind, made.draft.head.parallel) == (expected, kind == "peagle")
    assert made.optim.max_steps == STEPS[kind]["embedded"]
    assert made.source.name == "target"
    real = compose_settings([EXPERIMENT, *TARGETS["smollm2_135m"], *learning("smollm2_135m", kind)])
    assert real.draft.kind == expected
    assert real.generate.hidden_states == made.draft.is_head


def test_all_kinds_learn_from_the_same_texts(tmp_path: Path) -> None:
    """Of a target whose context is longer than what a drafter made from nothing would have."""
    tiny.model(max_position_embeddings=1024, num_hidden_layers=7).save_pretrained(tmp_path)
    own = (f"target.path={tmp_path}", "data.max_length=1024", f"root={tmp_path}")
    made = [
        plan(
            GENERATE,
            compose_config([EXPERIMENT, *TARGETS["embedded"], *learning("embedded", kind), *own]),
        )
        for kind in STEPS
    ]
    assert len({one.address for one in made}) == 1
    assert {lengths_of(one.config).window for one in made} == {1024}


def estimate(mean: float) -> dict[str, Any]:
    return {"mean": mean, "ci95": [mean - 0.25, mean + 0.25]}


def way(tau: float, gain: float) -> dict[str, Any]:
    return {
        "gamma": 3,
        "acceptance_length": estimate(tau),
        "tokens_per_second_end_to_end": 50 * gain,
        "plain_tokens_per_second_end_to_end": 50.0,
        "speedup": {"end_to_end": estimate(gain)},
    }


def summary(first: float, gain: float) -> dict[str, Any]:
    """Of an evaluation at one temperature."""
    ways = {
        "drafter": way(first, gain),
        "hybrid": way(first + 1, gain + 1),
        "prompt_lookup": way(1.5, 1.25),
    }
    lengths = {str(k): estimate(first + k / 100) for k in range(1, 13)}
    costs = {"cost_ratio": 0.125, "verify_ratio": 1.0625}
    return {"by_temperature": {"0": {"acceptance_length_by_k": lengths, "ways": ways, **costs}}}


def test_the_tables_hold_every_way_and_what_it_took() -> None:
    trained = {"source": "target", "divergence": "tvd", "steps": 9, "best_step": 6, "seconds": 90}
    config = Config(draft=DraftConfig(path="draftkit/embedded"))
    drafters = [
        Judged("plain", config, trained, {"1": summary(2, 1.5), "8": summary(2, 1)}),
        Judged(
            "medusa",
            config,
            trained,
            {"1": summary(3, 2), "8": summary(3, 1), "tree": summary(4, 3)},
        ),
    ]
    costs, taus, one, eight = tables(drafters, {"0": [1 + k / 10 for k in range(1, 13)]})
    assert "| plain | 7.6 M | target | tvd | 9 | 6 | 1.5 |" in costs
    assert "| prompt lookup | 1.10 | 1.20 | 1.30 | 1.40 | 1.50 | 1.60 | 1.70 | 1.80 |" in taus
    assert "| Medusa | 3.01 | 3.02 | 3.03 | 3.04 | 3.05 | 3.06 | 3.07 | 3.08 |" in taus
    for line in (
        "| T = 0, 1 at a time | K | tau | c | v | tokens/s | end to end |",
        "| plain decoding | 0 | 1 |  |  | 50.0 | 1 |",
        "| prompt lookup | 3 | 1.50 [1.25, 1.75] |  |  | 62.5 | 1.25 [1.00, 1.50] |",
        "| plain | 3 | 2.00 [1.75, 2.25] | 0.125 | 1.062 | 75.0 | 1.50 [1.25, 1.75] |",
        "| plain and prompt lookup | 3 | 3.00 [2.75, 3.25] |  |  | 125.0 | 2.50 [2.25, 2.75] |",
        "| Medusa, as a tree | 3 | 4.00 [3.75, 4.25] | 0.125 | 1.062 | 150.0 | 3.00 [2.75, 3.25] |",
    ):
        assert line in one
    assert "tree" not in eight
    assert "| Medusa | 3 | 3.00 [2.75, 3.25] | 0.125 | 1.062 | 50.0 | 1.00 [0.75, 1.25] |" in eight


def test_a_target_without_steps_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^target=qwen3_4b: this experiment has smollm2_135m and"):
        run([EXPERIMENT, "target=qwen3_4b"])
