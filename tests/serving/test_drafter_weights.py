"""Weights from outside are taken in the drafter's form, or not at all."""

import pytest
import torch

from draftkit.serving.drafters import fitted


def own() -> dict[str, torch.Tensor]:
    shared = torch.zeros(4, 3, dtype=torch.bfloat16)
    return {"embed": shared, "head": shared, "scale": torch.ones(3), "steps": torch.tensor(3)}


def given(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {"embed": torch.rand(4, 3), "scale": torch.rand(3).double(), "steps": torch.tensor(5)}
    return made | changes


def test_weights_come_in_the_drafters_precision_and_tied_ones_under_each_name() -> None:
    new = given()
    found = fitted(own(), new)
    assert set(found) == set(own())
    assert found["embed"].dtype == torch.bfloat16
    assert torch.equal(found["head"], new["embed"].bfloat16())
    assert found["scale"].dtype == torch.float32
    assert found["steps"] == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale": torch.tensor([1.0, torch.inf, 0.0])}, "scale holds numbers that are not finite"),
        ({"embed": torch.full((4, 3), 3.4e38)}, "embed holds numbers that are not finite"),
    ],
)
def test_weights_that_are_not_finite_are_refused(
    changes: dict[str, torch.Tensor], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        fitted(own(), given(**changes))
