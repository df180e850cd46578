"""What vLLM's workers compute with after a push: read back bit by bit, and counted in an engine.

Tests of real engines run by `pytest -m engines` after `make engines`.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftkit.config import DraftConfig, SamplingConfig, TargetConfig
from draftkit.endpoint import Endpoint
from draftkit.engines import push_vllm
from draftkit.engines.counters import Server
from draftkit.engines.folder import write_folder
from draftkit.engines.push_vllm import _read
from draftkit.models.files import ModelFolder
from draftkit.models.loading import save_model
from draftkit.online.push import Delivery, Vllm, differing
from draftkit.online.registry import Registry
from tests.engines.heads import swapped
from tests.engines.pairs import EMBEDDED, text_rows
from tests.engines.servers import Launch, serving
from tests.engines.test_heads import made
from tests.engines.test_real_engines import greedy, installed

TARGET = TargetConfig(path=str(EMBEDDED))
GAMMA, TOKENS = 3, 32
# Mixes up the rows of the head of one version, behind everybody's back.
FAULTY = """
from push_vllm import Push

class Faulty(Push):
    def draftkit_tensors(self, folder):
        tensors = super().draftkit_tensors(folder)
        if folder.name == "v000004":
            tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
        return tensors
"""


# What is read back


class Packed(nn.Module):
    """A layer of one of several workers, whose parameter is empty as vLLM's are on CPUs."""

    def __init__(self, weight: Tensor, **facts: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.quant_method = SimpleNamespace(apply=lambda layer, given, bias: given @ weight.T)
        vars(self).update(facts | {"params_dtype": torch.float32})


def worker(tensors: dict[str, Tensor], rank: int) -> nn.Module:
    """Rank `rank` of four: four heads of two rows, two of which have keys, and an output layer."""
    q, k, v, o = (tensors[f"a.{name}_proj.weight"] for name in "qkvo")
    mine, shared = slice(2 * rank, 2 * rank + 2), slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    joined = torch.cat([q[mine], k[shared], v[shared]])
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
    model.model = nn.Module()
    model.model.a = nn.Module()
    facts = {"tp_rank": rank, "input_size": 300}
    sizes = {"output_partition_sizes": [2, 2, 2], "output_sizes": [8, 8, 8], "output_size": 24}
    model.model.a.qkv_proj = Packed(joined, **facts, **sizes, num_kv_head_replicas=2)
    facts = {"tp_rank": rank, "input_size": 8, "input_size_per_partition": 2}
    facts |= {"output_partition_sizes": [300], "output_size": 300}
    model.model.a.o_proj = Packed(o[:, mine].contiguous(), **facts)
    return model


def test_every_worker_says_which_part_it_computes_with_and_what_differs_is_named(
    tmp_path: Path,
) -> None:
    shapes = {"q": (8, 300), "k": (4, 300), "v": (4, 300), "o": (300, 8)}
    random = torch.Generator().manual_seed(0)
    tensors = {
        f"a.{name}_proj.weight": torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")

    def read(held: dict[str, Tensor], ranks: int = 4) -> list[dict[str, Any]]:
        return [
            _read(worker(held, rank), name, list(tensor.shape))
            for rank in range(ranks)
            for name, tensor in tensors.items()
        ]

    assert differing(tmp_path, read(tensors)) == []
    assert differing(tmp_path, read(tensors, 3)) == ["a.o_proj.weight", "a.q_proj.weight"]
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed[1, 3] += 1e-6
        assert differing(tmp_path, read(tensors | {name: changed})) == [name]
    with pytest.raises(
        ValueError, match=r"^a\.q_proj\.weight has the shape \[9, 300\], and \[8, 300\]"
    ):
        _read(worker(tensors, 0), "a.q_proj.weight", [9, 300])
    with pytest.raises(ValueError, match=r"^the engine's drafter has no a\.x_proj\.weight: start"):
        _read(worker(tensors, 0), "a.x_proj.weight", [8, 300])


# A real vLLM


@dataclass
class Running:
    """A vLLM with the extension, and what brings versions to it."""

    url: str
    delivery: Delivery
    registry: Registry
    prompts: list[list[int]]
    life: ExitStack  # of the engine

    def publish(self, write: Callable[[Path], Any]) -> str | None:
        """What serves after a version that `write` makes was brought."""
        self.registry.publish(write, metrics={})
        return self.delivery.bring()

    def passes(self) -> list[int]:
        """Of each prompt, by vLLM's own counters."""
        how: Any = {"sampling": SamplingConfig(temperature=0.0), "limit": TOKENS, "seed": 0}
        with Endpoint("engine.url", self.url) as endpoint:
            answers = Server(endpoint).answers(self.prompts, **how)
        return [one.passes for one in answers]

    def answers(self) -> list[list[int]]:
        with httpx.Client(base_url=self.url, timeout=300) as client:
            return [greedy(client, "vllm", prompt) for prompt in self.prompts]


def launch_of(folder: Path, first: Path, *, untied: bool = True) -> Launch:
    """A launch with the drafter in `first`, exported to `folder`."""
    write_folder(DraftConfig(path=str(first)), TARGET, folder / "hf", gamma=GAMMA, untied=untied)
    shutil.copy(push_vllm.__file__, folder / "push_vllm.py")
    how = {"target": EMBEDDED, "gamma": GAMMA, "drafts": "argmax", "length": 256, "rows": 4}
    return Launch(folder=folder, **how, extension="push_vllm.Push")  # type: ignore[arg-type]


@contextmanager
def pushing(launch: Launch, write: Callable[[Path], Any]) -> Iterator[Running]:
    """vLLM by `launch`, and a registry that begins with what `write` makes."""
    registry = Registry(launch.folder / "drafters")
    registry.seed(write)

    def export(version: Any, path: Path) -> None:
        draft = DraftConfig(path=str(version.path))
        write_folder(draft, TARGET, path, gamma=GAMMA, untied=True)

    prompts = text_rows(6)[:, :16].tolist()
    with ExitStack() as life:
        url = life.enter_context(serving("vllm", launch))
        with Endpoint("engine.url", url, retries=2) as endpoint:
            folder = launch.folder / "pushed"
            delivery = Delivery("default", registry, Vllm(endpoint), write=export, folder=folder)
            yield Running(url, delivery, registry, prompts, life)


def own_drafter(folder: Path, *, shuffled: Sequence[str] = (), tied: bool = False) -> None:
    """The embedded target as a drafter, the rows of its embeddings or its head mixed up."""
    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name in shuffled:
            weight = model.get_submodule(name).weight
            weight.copy_(weight.flip(0))
    save_model(model, ModelFolder(TARGET).tokenizer, folder)


def right(folder: Path) -> None:
    own_drafter(folder)


def wrong(folder: Path) -> None:
    own_drafter(folder, shuffled=["lm_head"])


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_vllm_serves_what_is_reported_through_pushes_faults_load_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("vllm")
    wrong(tmp_path / "first")
    launch = replace(launch_of(tmp_path, tmp_path / "first"), extension="faulty.Faulty")
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pushing(launch, wrong) as one:
        answers, slow = one.answers(), one.passes()
        assert one.delivery.bring() == "v000001"
        assert one.passes() == slow
        assert one.publish(right) == "v000002"
        fast = one.passes()
        assert sum(fast) * 2.5 < sum(slow)
        assert one.publish(right) == "v000003"  # the same weights
        assert one.passes() == fast
        assert one.publish(right) == "v000003"  # mixed up on the way
        assert one.registry.served() == "v000003"
        assert one.passes() == fast
        assert one.answers() == answers

        with ThreadPoolExecutor(4) as pool:
            pushed = Event()

            def busy() -> list[Any]:
                made = [one.answers()]
                while not pushed.is_set():
                    made.append(one.answers())
                return made

            clients = [pool.submit(busy) for _ in range(4)]
            try:
                assert one.publish(wrong) == "v000005"
                assert one.publish(right) == "v000006"
            finally:
                pushed.set()
            assert all(made == answers for each in clients for made in each.result())
        assert one.passes() == fast

        def kill(engine: Vllm, *_: object) -> None:
            one.life.close()
            engine.serves()

        with monkeypatch.context() as patch:
            patch.setattr(Vllm, "_load", kill)
            assert one.publish(right) is None
        assert one.registry.served() is None
        port = int(one.url.rpartition(":")[2])
        one.life.enter_context(serving("vllm", replace(launch, port=port)))
        assert one.passes() == slow  # with which it was launched
        assert one.delivery.bring() == one.registry.served() == "v000007"
        assert one.passes() == fast
        assert one.answers() == answers


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_the_tied_head_of_a_running_vllm_does_not_stay_behind(tmp_path: Path) -> None:
    installed("vllm")

    def first(folder: Path) -> None:
        own_drafter(folder, shuffled=["model.embed_tokens"], tied=True)

    first(tmp_path / "first")
    launch = launch_of(tmp_path, tmp_path / "first", untied=False)
    with pushing(launch, first) as one:
        slow = one.passes()
        assert one.publish(lambda folder: own_drafter(folder, tied=True)) == "v000002"
        assert sum(one.passes()) * 2.5 < sum(slow)


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["its own", "parallel"])
def test_heads_are_pushed_too(tmp_path: Path, name: str) -> None:
    """What a head for one pass has of its own, the states behind its masks, goes with it."""
    installed("vllm")
    head = made().heads[name]
    other = swapped(head)
    if name == "parallel":
        other = other.changed(mask_hidden=-100 * head.tensors["mask_hidden"])
    launch = launch_of(tmp_path, other.write(tmp_path / "first"))
    with pushing(launch, other.write) as one:
        answers, slow = one.answers(), one.passes()
        assert one.publish(head.write) == "v000002"
        fast = one.passes()
        assert sum(fast) < sum(slow)
        assert one.publish(other.write) == "v000003"
        assert one.passes() == slow
        assert one.publish(head.write) == "v000004"
        assert one.passes() == fast
        assert one.answers() == answers
