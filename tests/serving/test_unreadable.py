"""What cannot be read at the moment is tried again; only what is damaged is refused for good."""

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from draftkit.decoding.decoder import Decoder
from draftkit.online.registry import Registry
from draftkit.serving.drafters import Drafters, same
from tests import tiny
from tests.serving.running import route_of, write

TARGET, DRAFT = tiny.pair()
WEIGHTS = {name: tensor.clone() for name, tensor in DRAFT.weights().items()}
NEXT = {name: tensor * 0.5 for name, tensor in WEIGHTS.items()}


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    made = Registry(tmp_path)
    made.seed(write(WEIGHTS))
    return made


class Failing:
    """Reads of the newest version's weights fail `times` times by `number`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
        self.left, self.number = times, number
        read = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: self.check(path) or read(path))

    def check(self, path: Path) -> None:
        if self.left > 0 and path.parent.name == "v000002":
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_read_error_that_passes_delays_a_version_and_nothing_else(
    registry: Registry,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    route = route_of("default", lambda: copy.deepcopy(DRAFT), registry)
    drafters = Drafters([route])
    drafters.attach(Decoder(TARGET, slots=1, capacity=8))
    drafters.poll()
    second = registry.publish(write(NEXT), metrics={})
    failing = Failing(monkeypatch, number, times=3)
    for _ in range(3):
        drafters.poll()
        assert drafters.versions() == {"default": "v000001"}
    assert failing.left == 0
    drafters.poll()
    assert drafters.versions() == {"default": second.name}
    assert same(route.proposer.weights(), NEXT)
    assert drafters.refused == 0
    assert caplog.text.count("cannot be followed") == 1
    assert os.strerror(number) in caplog.text


def test_a_start_does_not_begin_anew_for_a_read_error(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = registry.publish(write(NEXT), metrics={})

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(PermissionError):
            registry.seed(write(WEIGHTS))
    assert registry.seed(write(WEIGHTS)) == second
