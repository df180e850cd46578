"""What the rules say of vLLM and ONNX Runtime GenAI is what these engines do with the same folders.

Good pairs and every planted fault go to the real engines. Where a rule says WRONG, the engine fails
with the words below or is of the few that go on in silence; elsewhere it answers to the end.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftkit.artifacts import read_json, write_json
from draftkit.checking.engines import ENGINES
from draftkit.checking.rules import NOTE, WRONG
from draftkit.config import SamplingConfig
from tests.checking.faults import FAULTS, plant, save_good
from tests.checking.test_engines import seen
from tests.engines import environments
from tests.engines.onnx import joined

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

INSIDE = Path(environments.__file__).parent / "inside"
Outcomes = dict[str, dict[str, Any]]  # of a pair, by its name
GOOD_PAIRS = ("llama", "qwen2", "qwen3")
PLANTED = (*GOOD_PAIRS, *FAULTS)
VOCABULARY = "Target and draft model should have the same vocabulary size"
WIDTH = "Target and draft logit dimensions don't match"
NO_FILE = "no file named model.safetensors"
VLLM_SAYS = {
    "a few rows of padding": VOCABULARY,
    "many rows of padding": VOCABULARY,
    "small heads": "Unsupported CPU attention configuration: head_dim=16",
    "too many devices": r"attention heads \(2\) must be divisible by tensor parallel size \(3\)",
    "a cut table": "AssertionError",
    "an adapter": "no module or parameter named 'base_model'",
    "no weights": "Cannot find any model weights",
    "packed weights": "Unknown quantization method: bitsandbytes",
    "two kinds of layers": "Sliding window for some but all layers is not supported",
    "min_p": "min_p and logit_bias .* not yet supported with speculative decoding",
    "an unknown architecture": r"\['FutureForCausalLM'\] are not supported for now",
    "a recurrent draft": "All drafting layers should belong to the same kv cache group",
}
ONNX_SAYS = {
    "a few rows of padding": WIDTH,
    "many rows of padding": WIDTH,
    "no end": "Could not resolve eos_token_id",
    "a short context": r"max_length \(80\) cannot be greater than model context_length \(32\)",
    "rotary scaling that a builder refuses": "The dynamic RoPE style is not currently supported",
    "a rotation for each kind of layers": "KeyError: 'rope_type'",
    "a cut table": "ignore_mismatched_sizes",
    "an adapter": NO_FILE,
    "no weights": NO_FILE,
    "no tokenizer": "Couldn't instantiate the backend tokenizer",
    "packed weights": "The bitsandbytes quantized model is not currently supported",
    "two kinds of layers": "Cannot rewind",
    "an unknown architecture": "model is not currently supported",
    "a recurrent draft": "Speculative decoding does not support LFM2",
}
SILENT = {  # wrong, and nothing is refused
    "vllm_cpu": {"other ids", "no output head"},
    "onnx": {"other ids", "no output head", "rotary scaling that a builder leaves out"},
}


def copies(folder: Path) -> dict[str, Path]:
    """Good pairs, and one of every fault, below `folder`."""
    good = {name: save_good(folder / name, name) for name in GOOD_PAIRS}
    planted = {
        name: plant(fault, good[fault.architecture], folder / name.replace(" ", "_"))
        for name, fault in FAULTS.items()
    }
    return good | planted


def run(engine: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The results of `jobs` by the script of that engine, in its environment."""
    write_json(folder / "jobs.json", jobs)
    python = environments.FOLDER / engine / "bin" / "python"
    # Nothing is fetched, one thread, and no more memory than tiny models need.
    clean = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    clean |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(python), str(INSIDE / f"{engine}_pairs.py"), str(folder / "jobs.json")],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((Path(job["folder"]) / "result.json").read_text()) for job in jobs]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What vLLM does with each, in float32; `halved`: the good Llama pair in its own dtype."""
    if text := environments.missing("vllm"):
        pytest.skip(text)
    folder = tmp_path_factory.mktemp("vllm")
    pairs = copies(folder)
    pairs["halved"] = Path(shutil.copytree(pairs["llama"], folder / "halved"))
    jobs = [
        {
            "folder": str(path),
            "dtype": "auto" if name == "halved" else "float32",
            "tensor_parallel": FAULTS[name].tensor_parallel if name in FAULTS else 1,
        }
        for name, path in pairs.items()
    ]
    return dict(zip(pairs, run("vllm", jobs, folder), strict=True))


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What ONNX Runtime GenAI does with each: its builder first, then the pair that was built."""
    if text := environments.missing("onnx"):
        pytest.skip(text)
    folder = tmp_path_factory.mktemp("onnx")
    pairs = copies(folder)
    jobs = [{"folder": str(path), "step": "build"} for path in pairs.values()]
    outcomes = dict(zip(pairs, run("onnx", jobs, folder), strict=True))
    built = [name for name, outcome in outcomes.items() if "error" not in outcome]
    for name in built:
        join(pairs[name] / "onnx")
    jobs = [{"folder": str(pairs[name]), "step": "run"} for name in built]
    return outcomes | dict(zip(built, run("onnx", jobs, folder), strict=True))


def join(folder: Path) -> None:
    """Write the pair's configuration as `export` does, to draft two tokens a round, greedily.

    `export` makes the widths of both equal before: here they stay as they are.
    """
    target, draft = (read_json(folder / one / "genai_config.json") for one in ("target", "draft"))
    draft["model"]["vocab_size"] = target["model"]["vocab_size"]
    greedy = SamplingConfig(temperature=0.0)
    write_json(folder / "genai_config.json", joined(target, draft, gamma=2, sampling=greedy))


def findings(folder: Path, engine: str, name: str) -> dict[str, set[str]]:
    """The rules that speak of that engine on the pair of that name, by level."""
    path = copy_of(folder, name)
    devices = FAULTS[name].tensor_parallel if name in FAULTS else 1
    lines = [one for one in seen(path, engine, tensor_parallel=devices) if one.rule]
    assert {one.subject for one in lines} <= {ENGINES[engine]}
    return {level: {o.rule for o in lines if o.level == level} for level in (NOTE, WRONG)}


def copy_of(folder: Path, name: str) -> Path:
    if name in GOOD_PAIRS:
        return save_good(folder / name, name)
    good = save_good(folder / "good", FAULTS[name].architecture)
    return plant(FAULTS[name], good, folder / "planted")


def share(outcome: dict[str, Any]) -> float:
    """Of the drafted tokens that were looked at, those accepted."""
    return outcome["accepted"] / outcome["drafted"]


def agree(engine: str, says: dict[str, str], name: str, outcomes: Outcomes, folder: Path) -> None:
    """Assert that the level of the rules is what the engine did."""
    wrong, outcome = findings(folder, engine, name)[WRONG], outcomes[name]
    assert bool(wrong) == (name in says or name in SILENT[engine])
    if name in says:
        assert wrong == {FAULTS[name].rule}
        assert re.search(says[name], outcome.get("error", "no error"))
    else:
        assert "error" not in outcome, outcome


@pytest.mark.parametrize("name", PLANTED)
def test_vllm_does_what_the_rules_say(vllm: Outcomes, tmp_path: Path, name: str) -> None:
    agree("vllm_cpu", VLLM_SAYS, name, vllm, tmp_path)
    assert "error" in vllm[name] or vllm[name]["lengths"] == [70, 70]


@pytest.mark.parametrize("name", PLANTED)
def test_onnx_does_what_the_rules_say(onnx: Outcomes, tmp_path: Path, name: str) -> None:
    agree("onnx", ONNX_SAYS, name, onnx, tmp_path)
    assert "error" in onnx[name] or onnx[name]["lengths"] == [80, 80]


def test_good_pairs_draft_well(vllm: Outcomes, onnx: Outcomes) -> None:
    assert all(share(outcomes[name]) > 0.3 for outcomes in (vllm, onnx) for name in GOOD_PAIRS)


def test_a_head_that_no_file_holds_agrees_by_chance_alone(vllm: Outcomes, onnx: Outcomes) -> None:
    """That of the ONNX builder is drawn anew each time."""
    for outcomes in (vllm, onnx):
        assert share(outcomes["no output head"]) < 0.4 * share(outcomes["llama"])


def test_vllm_on_a_cpu_stops_drafting_where_a_draft_ends(vllm: Outcomes, tmp_path: Path) -> None:
    """A note: it goes on with zeros for drafts, beyond 32 tokens of the 74 and 78."""
    assert findings(tmp_path, "vllm_cpu", "a short context")[NOTE] >= {"context"}
    assert share(vllm["a short context"]) < 0.3 * share(vllm["llama"])


def test_onnx_computes_as_if_there_were_no_scaling_where_its_builder_leaves_it_out(
    vllm: Outcomes, onnx: Outcomes
) -> None:
    name = "rotary scaling that a builder leaves out"
    assert onnx[name] == onnx["llama"]
    assert vllm[name]["accepted"] != vllm["llama"]["accepted"]


def test_vllm_halves_a_target_of_float32_and_gives_the_draft_its_dtype(
    vllm: Outcomes, tmp_path: Path
) -> None:
    assert "dtype" in findings(tmp_path, "vllm_cpu", "llama")[NOTE]
    assert vllm["halved"]["dtypes"] == ["torch.bfloat16"] * 2
    assert vllm["llama"]["dtypes"] == ["torch.float32"] * 2
