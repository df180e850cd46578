"""A pair for ONNX Runtime GenAI: both models, and the one genai_config.json that joins them.

    onnx/genai_config.json    model.decoder: the target, model.draft: the drafter, speculative
    onnx/target/  onnx/draft/    as the engine's own builder writes them
    onnx/tokenizer.json ...      the target's

The models are made by `python -m onnxruntime_genai.models.builder` in the environment that has that
package; nothing of it is imported here.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from draftkit.artifacts import atomic_path, read_json, write_json
from draftkit.config import ModelConfig, SamplingConfig
from draftkit.engines.folder import tokenizer_files

CONFIG = "genai_config.json"
MOST = 16  # proposals a round


def write_onnx_pair(
    target: ModelConfig,
    draft: Path,
    folder: Path,
    *,
    python: Path,
    precision: str,
    gamma: int,
    sampling: SamplingConfig,
) -> None:
    """Write the pair to `folder`, with `gamma` proposals a round, searching as is served.

    Raises ValueError with what the builder says where it fails.
    """
    local = Path(target.location).is_dir()
    source = ["-i", str(Path(target.location).absolute())] if local else ["-m", target.location]
    with atomic_path(folder) as temporary:
        for name, words in (("target", source), ("draft", ["-i", str(draft.absolute())])):
            build([str(python)], words, temporary / name, precision, name)
        configs = [read_json(temporary / name / CONFIG) for name in ("target", "draft")]
        joint = joined(*configs, gamma=gamma, sampling=sampling)
        write_json(temporary / CONFIG, joint)
        for name, file in tokenizer_files(target).items():
            shutil.copyfile(file, temporary / name)


def build(python: list[str], source: list[str], folder: Path, precision: str, key: str) -> None:
    """Have the engine's builder write one model, for the processor."""
    folder = folder.absolute()  # the builder runs elsewhere
    with tempfile.TemporaryDirectory(prefix="draftkit-onnx-") as cache:
        command = [*python, "-m", "onnxruntime_genai.models.builder", *source, "-o", str(folder)]
        command += ["-p", precision, "-e", "cpu", "-c", cache]
        done = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (folder / CONFIG).is_file():
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ValueError(
            f"{key}.path: onnxruntime-genai cannot build it (status {done.returncode}, "
            f"{' '.join(last)[:300]})"
        )


def joined(
    target: dict[str, Any], draft: dict[str, Any], *, gamma: int, sampling: SamplingConfig
) -> dict[str, Any]:
    """One configuration of both, whose vocabularies are equally wide.

    The builder's own search keeps the 50 likeliest tokens: served is what `sampling` says.
    """
    widths = [one["model"]["vocab_size"] for one in (target, draft)]
    assert widths[0] == widths[1], widths
    model = json.loads(json.dumps(target["model"]))
    model["decoder"]["filename"] = f"target/{model['decoder']['filename']}"
    part = draft["model"]["decoder"]
    model["draft"] = {**part, "filename": f"draft/{part['filename']}"}
    model["context_length"] = min(one["model"]["context_length"] for one in (target, draft))
    search = {
        **target["search"],
        "max_length": model["context_length"],
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or 1.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    speculative = {"max_draft_tokens": min(gamma, MOST)}
    return {**target, "model": model, "search": search, "speculative": speculative}
