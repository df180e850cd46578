"""A buffer and a registry belong to what they were begun with."""

from pathlib import Path

import pytest

from draftkit.online.buffer import Buffer, Served
from draftkit.online.registry import require_same
from tests.online.traffic import entries, settings

MINE = {"target": "a", "draft": "b"}


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ({"target": "a", "draft": "c"}, "with another draft:"),
        ({"target": "x", "draft": "y"}, "with another target and draft:"),
        ({"target": "a"}, "with another draft:"),
        ({**MINE, "top_k": "8"}, "with another top_k:"),
        ({}, "does not tell with which target and draft it was made:"),
    ],
)
def test_what_differs_is_named_in_one_line_with_the_ways_out(
    stored: dict[str, str], told: str
) -> None:
    require_same(Path("x"), stored=dict(MINE), wanted=MINE)
    with pytest.raises(ValueError, match=r"^x .*name=.*overwrite=true") as error:
        require_same(Path("x"), stored=stored, wanted=MINE)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_buffer_that_tells_nothing_is_adopted_while_it_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    Buffer(path, settings()).close()
    Buffer(path, settings(), fingerprints=MINE).close()
    with pytest.raises(ValueError, match="another draft"):
        Buffer(path, settings(), fingerprints={**MINE, "draft": "c"})


@pytest.mark.parametrize("left", ["records", "counts"])
def test_a_used_buffer_that_tells_nothing_is_refused(tmp_path: Path, left: str) -> None:
    """As one of an earlier version, or of a program that gives none: who knows whose it is?"""
    path = tmp_path / "b.sqlite"
    buffer = Buffer(path, settings())
    if left == "records":
        buffer.append(entries(range(1)))
    else:
        buffer.add_served([Served(route="default", version="v000001", requests=1)])
    buffer.close()
    with pytest.raises(ValueError, match="does not tell with which target and draft it was made"):
        Buffer(path, settings(), fingerprints=MINE)
