"""Both trainers take their steps in turns; the loss in chunks is the plain one."""

import sys

import pytest
import torch

from draftkit.config import Config, DataConfig, DivergenceConfig, HardwareConfig, OptimConfig
from draftkit.distillation import chunked
from pipelines.benchmarks import training
from pipelines.benchmarks.training import beside_trl, check, chunked_costs, peak_of_call
from tests import tiny
from tests.trained import train_byte_bpe

CPU = torch.device("cpu")
MIB = 1 << 20


def test_both_trainers_are_timed_in_turns_after_a_warm_up(monkeypatch):
    pytest.importorskip("trl", minversion="1.16")  # older ones have no such trainer
    monkeypatch.setattr(training, "WARM_STEPS", 1)
    target, draft = tiny.pair()
    pair = tiny.target_of(target, train_byte_bpe(["a b c"], 300), 0)
    config = Config(
        divergence=DivergenceConfig(name="reverse_kl"),
        data=DataConfig(prompt_tokens=7, max_length=12),
        optim=OptimConfig(per_device_train_batch_size=2, learning_rate=1e-3, compile="false"),
    )
    before = draft.model.get_input_embeddings().weight.clone()
    turns = []
    real = training.time_ways

    def watched(ways, prompts, *others, **options):
        turns.append(real(ways, prompts, *others, **options))
        return turns[-1]

    monkeypatch.setattr(training, "time_ways", watched)
    prompts = tiny.prompts([4, 6, 3, 5, 7, 4] * 7, seed=1)[:40]
    found = beside_trl(pair, draft, prompts, config)
    for warm, count in zip(turns, (2, 40), strict=True):
        for way in warm.values():
            assert [answer.prompt_ids for answer in way.completions] == prompts[:count]
    assert found["steps"] == 20
    ours, theirs = (found["tokens_per_second"][name] for name in ("draftkit", "trl"))
    assert found["ratio_to_trl"] == pytest.approx(ours / theirs)
    low, high = found["ratio_ci95"]
    assert 0 < low < found["ratio_to_trl"] < high
    assert not torch.equal(before, draft.model.get_input_embeddings().weight)


def test_chunks_need_less_memory_for_the_same_gradient(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 16 * 4 * 5000)
    for name, size in {"TOKENS": 256, "VOCAB_SIZE": 5000, "WIDTHS": (16, 8)}.items():
        monkeypatch.setattr(training, f"LOSS_{name}", size)
    costs = chunked_costs(divergence="forward_kl", device=CPU, seed=0)
    assert costs["chunked_gradient_error"] < 1e-5
    assert costs["chunked_peak_fraction"] < 0.2
    assert costs["chunked_time_ratio"] > 0


def test_the_peak_is_what_was_held_at_once():
    def function():
        first = torch.zeros(3 * MIB, dtype=torch.uint8)
        del first
        kept = torch.zeros(2 * MIB, dtype=torch.uint8)
        return kept, torch.zeros(2 * MIB, dtype=torch.uint8)

    assert peak_of_call(function, CPU) == pytest.approx(4 * MIB, abs=1000)


def test_a_missing_peer_is_refused_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(training, "check_pair", lambda config: None)
    with pytest.raises(ValueError, match=r"^trl is not installed: pip install 'draftkit\[bench\]'"):
        check(Config(hardware=HardwareConfig(device="cpu")))
