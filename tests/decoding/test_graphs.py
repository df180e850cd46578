"""Units as they are run: made once for a key, owned or shared, and the same as machine code.

What a key must hold is `test_keys.py`'s business.
"""

import gc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import graphs
from draftkit.decoding.decoder import Decoder, packed_copies
from draftkit.decoding.graphs import (
    BATCHES,
    Units,
    batch_size,
    copy_tensors,
    tensors_of,
)
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.models.adapter import CausalAdapter
from draftkit.theory.warping import SamplingParams
from tests import tiny
from tests.decoding.driving import (
    DRAFT,
    SAMPLINGS,
    SMALL,
    Answer,
    Strict,
    assert_same,
    drive,
    fresh_graphs,
    request,
    strict_compiler,
)
from tests.tabular import TabularAdapter, random_adapter, relative

EXACT = 1e-10


@pytest.fixture
def strict() -> Iterator[Strict]:
    with strict_compiler() as backend:
        yield backend


# What `Units` keeps


def places_and_inputs() -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": torch.tensor([1.0, 2.0])}, torch.tensor([10.0, 20.0])


def add(places: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """A unit."""
    return places["weight"] + inputs


def units() -> Units:
    return Units(compiled=True, device=torch.device("cpu"))


class Owner:
    """Somebody with code of its own."""


def test_units_of_one_key_share_code_unless_they_are_owned(strict: Strict) -> None:
    places, inputs = places_and_inputs()
    made, owners = strict.made, (Owner(), Owner())
    for owner, expected in ((None, 1), (None, 1), (owners[0], 2), (owners[0], 2), (owners[1], 3)):
        found = units().run(add, places, inputs, key="k", owner=owner)
        assert found.tolist() == [11, 22]
        assert strict.made - made == expected
    units().run(add, places, inputs, key="other")
    assert strict.made - made == 4


def played(target: TabularAdapter, *, compiled: bool) -> list[Answer]:
    """Rounds of a pair of tables."""
    decoder = Decoder(target, slots=2, capacity=32, compiled=compiled)
    decoder.attach(DRAFT, DraftModelProposer(relative(target, 2)))
    return drive(decoder, [request([1, 2], new=6), request([3], row=1, new=4)])


def test_code_goes_with_its_owner(strict: Strict) -> None:
    target = random_adapter(8, 5)
    assert_same(played(target, compiled=True), played(target, compiled=False), atol=EXACT)
    assert list(graphs._by_owner) == [target]
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert not graphs._by_owner


def test_a_clock_runs_while_code_is_made_and_not_while_it_runs(strict: Strict) -> None:
    places, inputs = places_and_inputs()
    before = graphs.compile_seconds()
    units().run(add, places, inputs, key="clock")
    after = graphs.compile_seconds()
    assert after > before
    units().run(add, places, inputs, key="clock")
    assert graphs.compile_seconds() == after


def test_batches_are_of_few_sizes_and_never_of_more_rows_than_there_are_slots() -> None:
    assert BATCHES == (1, 4, 16, 64, 256)
    sizes = {(1, 9): 1, (2, 9): 4, (2, 3): 3, (4, 9): 4, (5, 9): 9, (65, 999): 256, (257, 999): 999}
    assert {pair: batch_size(*pair) for pair in sizes} == sizes


# Trees


class Leaf(NamedTuple):
    """A part of a tree."""

    tensor: Tensor
    nothing: None = None


def tree_of(value: float) -> tuple[Leaf, int, SamplingParams]:
    """Every kind of branch that inputs have."""
    return Leaf(torch.full((2,), value)), 3, SamplingParams.uniform(2, temperature=value)


def test_parts_of_frozen_dataclasses_that_are_the_same_objects_are_not_copied_again() -> None:
    one, target = tree_of(1.0), tree_of(5.0)
    copy_tensors(source=one, target=target)
    for part in tensors_of(target):
        part.zero_()
    other = (one[0], 3, replace(one[2], top_p=torch.full((2,), 0.5)))
    copy_tensors(source=other, target=target, last=one)
    assert target[0].tensor.tolist() == [1, 1]  # in a tuple, which may be written over
    assert target[2].top_p.tolist() == [0.5, 0.5]
    assert target[2].temperature.tolist() == [0, 0]


# Machine code

TEMPERATURES = tuple(SamplingConfig(temperature=t) for t in (0.7, 1.2, 0.4))
# Each has everything, lest the code change as rows leave.
MIXED = [
    SamplingConfig(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2),
    SamplingConfig(temperature=1.2, top_k=50, top_p=0.95, repetition_penalty=0.8),
    SamplingConfig(temperature=0.4, top_k=3, top_p=0.5, repetition_penalty=1.1),
]


@dataclass
class Machine:
    """A pair of models, whose rounds are compiled for batches of one size."""

    target: CausalAdapter
    draft: CausalAdapter
    gamma: int = 2
    verification: str = "speculative"
    samplings: Sequence[SamplingConfig] = TEMPERATURES

    def play(
        self, *, compiled: bool = False, late: bool = False, seed: int = 0, eos: int = 200
    ) -> list[Answer]:
        """Rows of all samplings, more than there are slots."""
        decoder = Decoder(
            self.target,
            slots=4,
            capacity=64,
            eos_token_ids=[eos],
            verification=self.verification,
            compiled=compiled,
            late=late,
        )
        decoder.attach(DRAFT, DraftModelProposer(self.draft))
        prompts = tiny.prompts([1, 14, 6, 9, 3, 11], seed=seed)
        requests = [
            request(
                prompt,
                gamma=self.gamma,
                new=12 + row,
                row=row,
                sampling=self.samplings[row % len(self.samplings)],
            )
            for row, prompt in enumerate(prompts)
        ]
        return drive(decoder, requests)

    def check(self, **options: Any) -> list[Answer]:
        """Compiled equals eager, read at once or late; returns the answers."""
        eager = self.play(**options)
        for late in (False, True):
            assert_same(self.play(compiled=True, late=late, **options), eager, atol=1e-5)
        return eager


def machine(architecture: str = "llama", *, constant: bool = True, **options: Any) -> Machine:
    """A target and a draft of one layer."""
    shape = SMALL if architecture == "llama" else {}
    target, draft = tiny.pair(architecture, **shape)
    target.requires_grad_(not constant)
    return Machine(target, draft, **options)


@contextmanager
def one_batch_size() -> Iterator[None]:
    """All batches of four slots are of four rows."""
    with pytest.MonkeyPatch.context() as patch, fresh_graphs():
        patch.setattr(graphs, "BATCHES", (4,))
        yield


@pytest.fixture(scope="module")
def real() -> Iterator[Machine]:
    """A pair with a frozen target, compiled by the compiler that ships."""
    with one_batch_size():
        made = machine()
        assert packed_copies(made.target) > 0
        with warnings.catch_warnings():  # of a busy disk, not of the code
            warnings.filterwarnings("ignore", "VecISA dlopen probe", UserWarning)
            made.play(compiled=True)
        yield made


def compiled_units() -> int:
    return len(graphs._shared) + sum(map(len, graphs._by_owner.values()))


@pytest.mark.timeout(900)
def test_machine_code_gives_what_eager_code_gives(real: Machine) -> None:
    answers = real.check()
    accepted = {fact[0][2] - 1 for answer in answers for fact in answer.facts}
    assert accepted == {0, 1, 2}
    assert compiled_units() == 2


@pytest.mark.timeout(900)
def test_a_frozen_target_freezes_nothing_of_a_decoder(real: Machine) -> None:
    """Decoders of one target share its graph, with other ids, seeds, texts and lengths."""
    for seed in range(3):
        whole = real.play(seed=seed)
        ended = [answer.facts[-1][0][4] for answer in real.check(seed=seed, eos=whole[0].text[3])]
        assert ended[0]
        assert not all(ended)
    assert compiled_units() == 2


@pytest.mark.timeout(900)
def test_machine_code_reads_new_weights_of_the_draft(real: Machine) -> None:
    old = {name: weight.clone() for name, weight in real.draft.model.state_dict().items()}
    before = real.check()
    real.draft.load_weights(tiny.related(real.target.model, noise=0.5).state_dict())
    after = real.check()
    real.draft.load_weights(old)
    assert [a.facts for a in after] != [b.facts for b in before]
    assert_same(real.check(), before, atol=0)
    assert compiled_units() == 2


KINDS: dict[str, dict[str, Any]] = {
    "everything": {"gamma": 2, "samplings": MIXED},
    "plain": {"architecture": "qwen3", "gamma": 0, "samplings": MIXED},
    "one proposal, block": {"architecture": "gpt2", "gamma": 1, "verification": "block"},
    "windows": {"architecture": "mistral", "gamma": 4, "samplings": MIXED},
    "match": {"architecture": "gemma", "gamma": 2, "verification": "match"},
    "greedy": {"architecture": "gpt_neox", "gamma": 4, "samplings": SAMPLINGS[2:3]},
    "windows and caps": {"architecture": "gemma2", "gamma": 3, "verification": "block"},
    "open weights": {"architecture": "qwen2", "gamma": 4, "constant": False},
}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_machine_code_of_every_kind(kind: dict[str, Any]) -> None:
    with one_batch_size():
        made = machine(**kind)
        for seed in range(4):
            made.check(seed=seed)
        assert compiled_units() == (1 if made.gamma == 0 else 2)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:VecISA dlopen probe:UserWarning")
def test_weights_opened_to_training_are_read_anew_by_machine_code_and_go_with_the_target() -> None:
    with one_batch_size():
        made = machine(gamma=0)
        first = made.check()
        made.target.requires_grad_(True)
        with torch.no_grad():
            for weight in made.target.parameters():
                weight.mul_(1.2)
        second = made.check()
        with torch.no_grad():
            for weight in made.target.parameters():
                weight.div_(1.2)
        assert [a.text for a in second] != [a.text for a in first]
        assert [a.text for a in made.check()] == [a.text for a in first]
        gone = weakref.ref(made.target)
        del made
        gc.collect()
        assert gone() is None
        assert compiled_units() == 0


def test_seconds_of_compiling_add_up_and_what_runs_inside_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, ticks = graphs.compile_seconds(), iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: next(ticks))
    with graphs._timed(), graphs._timed():
        pass
    assert graphs.compile_seconds() - before == pytest.approx(6.0)
