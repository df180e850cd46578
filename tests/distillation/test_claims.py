"""A loss is told from others by its source and by what it was made with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftkit.distillation.claims import source_of


def made(factor: Any, change: Callable[[Any], Any] = abs) -> Callable[..., Any]:
    def loss(values: Any, *, shift: Any = 0.0, scale: Any = factor) -> Any:
        return change(values * factor * scale + shift)

    return loss


def up(value: Any) -> Any:
    return value + 1


def down(value: Any) -> Any:
    return value - 1


def test_equal_functions_are_the_same_wherever_they_were_made() -> None:
    assert source_of(made(2.0, up)) == source_of(made(2.0, up))


def test_numbers_functions_and_defaults_that_one_was_made_with_count() -> None:
    losses = [made(2.0, up), made(3.0, up), made(2.0, down), up]
    assert len({repr(source_of(loss)) for loss in losses}) == len(losses)


@pytest.mark.parametrize("loss", [made(torch.ones(1), up), made(2.0), torch.exp, torch.nn.ReLU()])
def test_what_cannot_be_told_is_refused_in_one_line(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"^divergence: .* leave folder out") as error:
        source_of(loss)
    assert "\n" not in str(error.value)
