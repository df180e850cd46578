"""How each engine is started with an exported pair: exact options, and the acceptance to expect.

Text alone; nothing is run here. Options are those of vLLM 0.33, SGLang 0.5.23, llama.cpp 0.5,
transformers 5.23 and ONNX Runtime GenAI 0.18. Servers listen on this machine only, until a later
--host says otherwise.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftkit.config import PARD, PLAIN, SamplingConfig
from draftkit.evaluation.cards import (
    ABOUT,
    llamacpp_options,
    sglang_options,
    transformers_code,
    vllm_options,
)
from draftkit.evaluation.engines import ARGMAX, LAUNCHED, best_gamma_of, launched_row, serves
from draftkit.evaluation.report import interval
from draftkit.models.heads import EAGLE3
from draftkit.models.parallel import ENCODER_DECODER

LOOPBACK = ["--host", "127.0.0.1"]
TITLES = {
    "hf": "transformers",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp, both models converted by its convert_hf_to_gguf.py",
    "onnx": "ONNX Runtime GenAI, both models built by its builder, then joined",
}
ONNX = """\
import json
from pathlib import Path

import onnxruntime_genai as engine

folder = Path("onnx")
target, draft = (
    json.loads((folder / name / "genai_config.json").read_text()) for name in ("target", "draft")
)
for name, part in (("target", target), ("draft", draft)):
    decoder = part["model"]["decoder"]
    decoder["filename"] = f"{name}/{decoder['filename']}"
target["model"]["draft"] = draft["model"]["decoder"]
length = min(part["model"]["context_length"] for part in (target, draft))
target["model"]["context_length"] = length
target["search"] |= {"max_length": length} | SEARCH
target["speculative"] = {"max_draft_tokens": GAMMA}
(folder / "genai_config.json").write_text(json.dumps(target, indent=2))
for file in (folder / "target").glob("*token*"):
    (folder / file.name).write_bytes(file.read_bytes())

model = engine.Model(str(folder))
tokenizer = engine.Tokenizer(model)
params = engine.GeneratorParams(model)
params.set_search_options(max_length=128)
params.set_speculative_options(max_draft_tokens=GAMMA, min_adaptive_k=0)
generator = engine.Generator(model, params)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
print(generator.get_speculative_stats())
"""

Judged = Mapping[str, Any] | None  # the summary of an evaluation


def launched_gammas(judged: Judged, gamma: int, *, kind: str) -> dict[str, int]:
    """Proposals a round with which each engine is started that serves a drafter of `kind`: the best
    by what it accepts, at least one; `gamma` where nothing was judged."""
    engines = [name for name, (engine, _) in LAUNCHED.items() if serves(engine, kind)]
    if judged is None:
        return dict.fromkeys(engines, gamma)
    return {engine: max(best_gamma_of(judged, engine), 1) for engine in engines}


def expected(judged: Judged, engine: str) -> dict[str, Any] | None:
    """What the evaluation predicts of the launched setting of `engine`; None where it does not.

    acceptance: of a proposal that is tested; acceptance_length: tokens a pass of the target, at
    `gamma` proposals.
    """
    row = launched_row(judged, engine) if judged else None
    if judged is None or row is None:
        return None
    length = row.get("at_best_gamma", row)
    return {
        "temperature": judged["temperature"],
        "acceptance": row["acceptance"],
        "gamma": length["gamma"],
        "acceptance_length": length["acceptance_length"],
    }


def launch_text(
    target: str,
    *,
    revision: str | None,
    gammas: Mapping[str, int],
    judged: Judged,
    kind: str,
    sampling: SamplingConfig,
) -> str:
    """The commands of each engine of `gammas`, to be run in the exported folder, and what to expect
    of it.

    target: its folder or its name on the hub, pinned to `revision`. kind: of the drafter.
    """
    parts = ["# How engines load this drafter\n\nRun these in the folder of this file.\n"]
    if kind != PARD and kind in ABOUT:
        parts.append(f"\n{ABOUT[kind].strip()}\n")
    pinned = ["--revision", revision] if revision else []
    for engine, gamma in gammas.items():
        lines = "".join(f"{line}\n" for line in remarks(judged, engine, kind=kind))
        if engine == "hf":
            seq2seq = kind == ENCODER_DECODER
            code = transformers_code(json.dumps(target), '"hf"', gamma, revision, seq2seq=seq2seq)
            text = python(code)
        elif engine == "vllm":
            speculative = [
                "--speculative-config",
                json.dumps(vllm_options("./hf", gamma, kind=kind)),
            ]
            text = shell(["vllm", "serve", target, *pinned, *LOOPBACK, *speculative])
        elif engine == "sglang":
            server = ["python", "-m", "sglang.launch_server", "--model-path", target, *pinned]
            text = shell([*server, *LOOPBACK, *sglang_options("./hf", gamma, kind=kind)])
        elif engine == "llamacpp":
            text = llamacpp(target, gamma, pinned=pinned, kind=kind)
        else:
            text = onnx(target, gamma, sampling)
        parts.append(f"\n## {TITLES[engine]}\n\n{lines}\n{text}")
    return "".join(parts)


def remarks(judged: Judged, engine: str, *, kind: str) -> list[str]:
    """What to expect of the engine, and of gamma, in lines."""
    lines = []
    if numbers := expected(judged, engine):
        lines += [
            f"- at temperature {numbers['temperature']:g}, computed from texts of the target: "
            f"{interval(numbers['acceptance'])} of the proposals that are tested are accepted, "
            f"{interval(numbers['acceptance_length'], 2)} tokens a pass at gamma "
            f"{numbers['gamma']}",
        ]
    if judged:
        row, gamma = launched_row(judged, engine), best_gamma_of(judged, engine)
        drafts = " of argmax drafts" if row is not None and row["mode"] == ARGMAX else ""
        lines.append(
            f"- best gamma{drafts} at batch size {judged['batch_size']}, by draftkit's decoder: "
            f"{gamma or '0, which is not to speculate'}"
        )
    else:
        lines.append("- no evaluation says what to expect: draftkit evaluate, then export again")
    if kind == PARD and engine != "vllm":
        lines.append("- the drafter proposes all tokens in one pass in vLLM; here one by one")
    return lines


def shell(*commands: Sequence[str]) -> str:
    """A block of commands, each a line."""
    lines = "".join(f"{shlex.join(words)}\n" for words in commands)
    return f"```sh\n{lines}```\n"


def python(code: str) -> str:
    return f"```python\n{code}```\n"


def on_hub(target: str) -> bool:
    """Whether the target is named on the hub, and no folder or file of this machine."""
    return not Path(target).is_absolute()


def llamacpp(target: str, gamma: int, *, pinned: Sequence[str] = (), kind: str = PLAIN) -> str:
    """Both models as GGUF, and llama-server on them. Of a head's target the converter reads the
    folder, which a name on the hub becomes first."""
    convert = ["python", "convert_hf_to_gguf.py", "--outtype", "q8_0", "--outfile"]
    remote, commands, options = ["--remote"] if on_hub(target) else [], [], []
    if kind == EAGLE3:
        if on_hub(target):
            commands.append(["hf", "download", target, *pinned, "--local-dir", "target"])
            remote, target = [], "target"
        options = ["--target-model-dir", target]
    files = ["-m", "target.gguf", "-md", "draft.gguf"]
    return shell(
        *commands,
        [*convert, "target.gguf", *remote, target],
        [*convert, "draft.gguf", *options, "./hf"],
        ["llama-server", *files, *LOOPBACK, *llamacpp_options(gamma, kind=kind)],
    )


def onnx(target: str, gamma: int, sampling: SamplingConfig) -> str:
    """Both models by the engine's builder, and a program that joins and runs them.

    It searches as is served, and prints the engine's own counts.
    """
    build = ["python", "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    build += ["-c", "onnx/cache", "-o"]
    search = {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or 1.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    code = ONNX.replace("SEARCH", repr(search)).replace("GAMMA", str(gamma))
    source = ["-m" if on_hub(target) else "-i", target]
    commands = [[*build, "onnx/target", *source], [*build, "onnx/draft", "-i", "./hf"]]
    return f"{shell(*commands)}\n{python(code)}"
