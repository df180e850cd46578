"""Engines as the teacher: their scores are the target's, and what is not the target is refused."""

from collections.abc import Iterator

import pytest
import torch

from draftkit.config import DivergenceConfig, OptimConfig, SamplingConfig, TargetConfig
from draftkit.config.experiment import HardwareConfig
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.losses import Objective, RemoteTeacher, TargetTeacher
from draftkit.distillation.remote import RETRIES, is_same_law, remote_target
from draftkit.distillation.scores import stored_scores
from draftkit.distillation.trainer import Trainer
from draftkit.models.loading import save_model
from tests import tiny
from tests.distillation.serving import Engine, remote, served
from tests.online import making

TOP_K = 64
TOKENIZER = tiny.byte_tokenizer()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served(made()) as running:
        yield running


def made(seed: int = 2) -> Engine:
    return Engine(tiny.adapter(seed=seed), [0], TOKENIZER.decode, TOKENIZER.encode)


def test_what_an_engine_names_are_the_scores_of_the_target(engine: Engine) -> None:
    records = making.traffic(5)
    expected = stored_scores(making.target(), records, k=TOP_K, loss_temperature=1.0)
    for own, other in zip(remote(engine, top_k=TOP_K).scored(records), expected, strict=True):
        assert own.topk_ids == other.topk_ids
        for name in ("topk_log_probs", "tail_mass", "loss_tail_mass"):
            values = (torch.tensor(getattr(one, name)) for one in (own, other))
            torch.testing.assert_close(*values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["forward_kl", "tvd", "jsd"])
def test_its_gradient_is_that_of_the_target_itself(
    engine: Engine, name: str, temperature: float
) -> None:
    texts = [continued(one.prompt_ids, one.output_ids) for one in making.traffic(8)]
    batch = collate(texts, device=torch.device("cpu"))
    gradients = []
    for teacher in (
        TargetTeacher(making.target()),
        RemoteTeacher(remote(engine, top_k=TOP_K), temperature),
    ):
        draft = tiny.adapter(seed=9)
        trainer = Trainer(
            draft,
            teacher,
            Objective(DivergenceConfig(name=name), SamplingConfig(), temperature),
            optim=OptimConfig(max_grad_norm=1e9, learning_rate=1e-9),
        )
        kept: list[torch.Tensor] = []
        clip = trainer.accelerator.clip_grad_norm_

        def note(weights, limit, kept=kept, clip=clip):
            weights = [*weights]
            kept += [one.grad.flatten().clone() for one in weights]
            return clip(weights, limit)

        trainer.accelerator.clip_grad_norm_ = note
        trainer.step(batch)
        gradients.append(torch.cat(kept))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_ids_of_padding_are_left_out_and_rows_stay_whole() -> None:
    target = remote(made_url := Engine(None, [], str), top_k=3)
    assert made_url.url == ""
    rows = [[(-0.1, tiny.VOCAB_SIZE + 1), (-0.5, 4), (-1.0, 2), (-2.0, 9), (-3.0, 1)], [(-0.2, 1)]]
    ids, log_probs = target._tensors(rows)
    assert ids.tolist() == [[4, 2, 9], [1, 0, 2]]
    assert log_probs.tolist() == [[-0.5, -1.0, -2.0], [-0.2, -torch.inf, -torch.inf]]


def test_a_dead_engine_costs_a_retry_and_of_two_the_other_one_answers(engine: Engine) -> None:
    texts = [continued(one.prompt_ids, one.output_ids) for one in making.traffic(3)]
    expected = remote(engine, top_k=4).scores(texts)
    engine.failures = [503] * RETRIES
    asked = len(engine.asked)
    assert is_same_law(remote(engine, top_k=4, at_once=1).scores(texts), expected)
    assert len(engine.asked) == asked + RETRIES + len(texts)
    nobody = Engine(None, [], str)
    nobody.url = "http://127.0.0.1:9/v1"
    assert is_same_law(remote(nobody, engine, top_k=4).scores(texts), expected)


# What is refused when a run begins


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's folder, of which an engine's owner needs no weights."""
    path = tmp_path_factory.mktemp("target") / "model"
    save_model(tiny.model(seed=2), TOKENIZER, path)
    (path / "model.safetensors").unlink()
    return str(path)


def opened(folder: str, *engines: Engine, top_k: int = TOP_K):
    target = TargetConfig(path=folder, urls=[engine.url for engine in engines])
    return remote_target(target, HardwareConfig(dtype="float32"), top_k=top_k)


def test_the_target_is_opened_without_its_weights(folder: str, engine: Engine) -> None:
    target = opened(folder, engine)
    assert (target.model, target.top_k, target.vocab_size) == ("tiny", TOP_K, tiny.VOCAB_SIZE)
    assert target.probe is not None
    target.check_law([one.tolist() for one in target.probe], "contexts")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"encode": lambda text: [5, 6, 7]}, "reads 'Three words.* by other ids than the token"),
        ({"returns_ids": False}, "tells no ids of its texts"),
        ({"scores": False}, r"scores no given text \(prompt_logprobs\)"),  # as llama.cpp
        ({"max_logprobs": 20}, r"generate\.top_k=64 ids: start vLLM with --max-logprobs 64"),
        ({"is_stale": True}, "scores one text in two ways, as from a stale cache"),
    ],
)
def test_an_engine_that_cannot_teach_is_refused_in_one_line(
    folder: str, engine: Engine, says: dict[str, object], words: str
) -> None:
    vars(engine).update(says)
    with pytest.raises(ValueError, match=rf"^target\.urls: .*{words}") as error:
        opened(folder, engine)
    assert "\n" not in str(error.value)


def test_engines_that_serve_two_models_are_refused_by_name_or_by_scores(
    folder: str, engine: Engine
) -> None:
    with served(made(seed=5)) as other:
        with pytest.raises(ValueError, match=r"score one text in two ways: serve one model"):
            opened(folder, engine, other)
        other.name = "another"
        with pytest.raises(ValueError, match=r"serve tiny and another: all must serve one model"):
            opened(folder, engine, other)


def test_a_model_that_is_not_the_one_of_before_is_refused(folder: str, engine: Engine) -> None:
    probe = opened(folder, engine).probe
    assert probe is not None
    with (
        served(made(seed=5)) as other,
        pytest.raises(ValueError, match=r"pipelines\.contexts \.\.\. overwrite"),
    ):
        opened(folder, other).check_law([one.tolist() for one in probe], "contexts")
