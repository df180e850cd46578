"""Weights from outside are taken in the drafter's form, or not at all."""

from typing import Any

import pytest
import torch

from draftkit.serving.drafters import fitted, same


def own() -> dict[str, torch.Tensor]:
    shared = torch.zeros(4, 3, dtype=torch.bfloat16)
    return {"embed": shared, "head": shared, "scale": torch.ones(3), "steps": torch.tensor(3)}


def given(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {"embed": torch.rand(4, 3), "scale": torch.rand(3).double(), "steps": torch.tensor(5)}
    return made | changes


class Watched(torch.Tensor):
    """A tensor that says it is on a device, and counts who looks at a number of it."""

    looks = 0

    @property
    def is_cuda(self) -> bool:  # pyrefly: ignore[bad-override]
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looking = (torch.equal, torch.Tensor.__bool__, torch.Tensor.tolist, torch.Tensor.item)
        Watched.looks += func in looking
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_device_is_looked_at_once_however_many_tensors_there_are() -> None:
    mine = {name: tensor.as_subclass(Watched) for name, tensor in own().items()}
    new = {name: tensor.as_subclass(Watched) for name, tensor in given().items()}
    Watched.looks = 0
    found = fitted(mine, new)
    assert Watched.looks == 1
    assert not same(mine, found)
    assert Watched.looks == 2
    for name, tensor in mine.items():
        tensor.copy_(found[name])
    assert same({**mine, "head": mine["head"]}, found)
    assert Watched.looks == 3


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


def test_one_bit_makes_a_difference() -> None:
    mine = {"a": torch.rand(5), "b": torch.rand(2)}
    other = {name: tensor.clone() for name, tensor in mine.items()}
    assert same(mine, other)
    other["b"][1] = torch.nextafter(other["b"][1], torch.tensor(2.0))
    assert not same(mine, other)
