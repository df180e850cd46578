"""How each engine is started with an exported pair: exact options, and the acceptance to expect.

Texts alone; nothing is run and no file is written here. Options are those of vLLM 0.33, SGLang
0.5.23, llama.cpp 0.5, transformers 5.23 and ONNX Runtime GenAI 0.18. Servers listen on this machine
only, until a later --host says otherwise.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftkit.config import SamplingConfig
from draftkit.evaluation.cards import (
    llamacpp_options,
    sglang_options,
    transformers_code,
    vllm_options,
)
from draftkit.evaluation.engines import ARGMAX, best_gamma_of, launched_row
from draftkit.evaluation.report import interval

LOOPBACK = ["--host", "127.0.0.1"]
GGUF_TYPE, ONNX_PRECISION = "q8_0", "fp32"  # of the converted models


@dataclass(frozen=True)
class Pair:
    """A pair to launch: the target's folder or name, and what is known of it.

    gamma: proposals a round where nothing was judged. judged: the summary of its evaluation.
    parallel: whether the drafter proposes all tokens in one pass. sampling: as is served.
    """

    target: str
    revision: str | None = None
    gamma: int = 1
    judged: Mapping[str, Any] | None = None
    parallel: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


def launched_gamma(pair: Pair, engine: str) -> int:
    """Proposals a round with which `engine` is started: the best by what it accepts, and one at
    least."""
    return max(best_gamma_of(pair.judged, engine), 1) if pair.judged else pair.gamma


def expected(pair: Pair, engine: str) -> dict[str, Any] | None:
    """What the evaluation predicts of the launched setting of `engine`; None where it does not.

    acceptance: of a proposal that is tested; acceptance_length: tokens a pass of the target, at
    `gamma` proposals.
    """
    row = launched_row(pair.judged, engine) if pair.judged else None
    if pair.judged is None or row is None:
        return None
    length = row.get("at_best_gamma", row)
    return {
        "temperature": pair.judged["temperature"],
        "acceptance": row["acceptance"],
        "gamma": length["gamma"],
        "acceptance_length": length["acceptance_length"],
    }


def remarks(pair: Pair, engine: str) -> str:
    """What to expect of the engine, and of gamma, in lines of a comment."""
    lines = []
    if numbers := expected(pair, engine):
        lines += [
            f"Expect at temperature {numbers['temperature']:g}, computed from texts of the target:",
            f"  accepted of the proposals that are tested: {interval(numbers['acceptance'])}",
            f"  tokens a pass of the target at gamma {numbers['gamma']}: "
            f"{interval(numbers['acceptance_length'], 2)}",
        ]
    else:
        lines.append("No evaluation says what to expect: draftkit evaluate, then export again.")
    if pair.parallel and engine != "vllm":
        lines.append("The drafter proposes all tokens in one pass in vLLM; here one by one.")
    if pair.judged:
        row, gamma = launched_row(pair.judged, engine), best_gamma_of(pair.judged, engine)
        drafts = " of argmax drafts" if row is not None and row["mode"] == ARGMAX else ""
        lines.append(
            f"Best gamma{drafts} at batch size {pair.judged['batch_size']}, by draftkit's decoder: "
            f"{gamma or '0, which is not to speculate'}."
        )
    return "".join(f"# {line}\n" for line in lines)


def script(pair: Pair, engine: str, command: Sequence[str], *, name: str) -> str:
    """A shell script that runs `command` in the exported folder; words behind it are added."""
    return (
        "#!/bin/sh\n"
        f"# {name} with this drafter: sh {engine}/launch.sh [its own options]\n"
        f"{remarks(pair, engine)}"
        'cd "$(dirname "$0")/.." || exit\n'
        f'exec {" ".join(command)} "$@"\n'
    )


def converter(by: str, commands: Sequence[Sequence[str]], *, name: str) -> str:
    """A shell script that converts both models, run once; a word in quotes is left as it is."""
    lines = [
        " ".join(word if word.startswith('"') else shlex.quote(word) for word in ["python", *words])
        for words in commands
    ]
    return (
        f"#!/bin/sh\n# Converts both models by {by}: sh {name}/convert.sh\n"
        'cd "$(dirname "$0")/.." || exit\nset -e\n' + "".join(f"{line}\n" for line in lines)
    )


def on_hub(pair: Pair) -> bool:
    """Whether the target is named on the hub, and no folder or file of this machine."""
    return not Path(pair.target).is_absolute()


def revision_of(pair: Pair) -> list[str]:
    return ["--revision", pair.revision] if pair.revision else []


def hf(pair: Pair) -> dict[str, str]:
    """A program beside the weights."""
    gamma = launched_gamma(pair, "hf")
    here = "str(Path(__file__).parent)"
    code = transformers_code(json.dumps(pair.target), here, gamma, pair.revision)
    return {"generate.py": f"{remarks(pair, 'hf')}from pathlib import Path\n\n{code}"}


def vllm(pair: Pair) -> dict[str, str]:
    """`vllm serve`, with `--speculative-config` as a file."""
    options = vllm_options("./hf", launched_gamma(pair, "vllm"), parallel=pair.parallel)
    command = ["vllm", "serve", shlex.quote(pair.target), *map(shlex.quote, revision_of(pair))]
    command += [*LOOPBACK, "--speculative-config", '"$(cat vllm/speculative_config.json)"']
    return {
        "speculative_config.json": json.dumps(options, indent=2) + "\n",
        "launch.sh": script(pair, "vllm", command, name="vLLM"),
    }


def sglang(pair: Pair) -> dict[str, str]:
    """The drafter as a model of its own (STANDALONE)."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", pair.target]
    words += [
        *revision_of(pair),
        *LOOPBACK,
        *sglang_options("./hf", launched_gamma(pair, "sglang")),
    ]
    return {"launch.sh": script(pair, "sglang", [*map(shlex.quote, words)], name="SGLang")}


def llamacpp(pair: Pair) -> dict[str, str]:
    """llama-server on both models as GGUF, and the commands that make these files."""
    files = {key: f"llamacpp/{key}-{GGUF_TYPE}.gguf" for key in ("target", "draft")}
    remote = ["--remote"] if on_hub(pair) else []
    command = ["llama-server", "-m", files["target"], "-md", files["draft"], *LOOPBACK]
    command += llamacpp_options(launched_gamma(pair, "llamacpp"))
    return {
        "convert.sh": converter(
            "llama.cpp's convert_hf_to_gguf.py, named by CONVERT",
            [
                ['"${CONVERT:?the path of convert_hf_to_gguf.py}"', *words]
                for words in (
                    ["./hf", "--outtype", GGUF_TYPE, "--outfile", files["draft"]],
                    [pair.target, *remote, "--outtype", GGUF_TYPE, "--outfile", files["target"]],
                )
            ],
            name="llamacpp",
        ),
        "launch.sh": script(pair, "llamacpp", command, name="llama.cpp"),
    }


def onnx(pair: Pair) -> dict[str, str]:
    """A program that joins both models and prints the engine's own counts, and its builder's
    commands."""
    source = ["-m" if on_hub(pair) else "-i", pair.target]
    builder = ["-m", "onnxruntime_genai.models.builder"]
    options = ["-p", ONNX_PRECISION, "-e", "cpu", "-c", "onnx/cache", "-o"]
    commands = [
        [*builder, *source, *options, "onnx/target"],
        [*builder, "-i", "./hf", *options, "onnx/draft"],
    ]
    search = {
        "do_sample": pair.sampling.temperature > 0,
        "temperature": pair.sampling.temperature or 1.0,
        "top_k": pair.sampling.top_k,
        "top_p": pair.sampling.top_p,
        "repetition_penalty": pair.sampling.repetition_penalty,
    }
    code = f"""\
import json
from pathlib import Path

import onnxruntime_genai as engine

folder, search = Path(__file__).parent, {search}
target, draft = (
    json.loads((folder / name / "genai_config.json").read_text()) for name in ("target", "draft")
)
for name, part in (("target", target), ("draft", draft)):
    decoder = part["model"]["decoder"]
    decoder["filename"] = f"{{name}}/{{decoder['filename']}}"
target["model"]["draft"] = draft["model"]["decoder"]
length = min(part["model"]["context_length"] for part in (target, draft))
target["model"]["context_length"] = length
target["search"] |= {{"max_length": length}} | search
target["speculative"] = {{"max_draft_tokens": {launched_gamma(pair, "onnx")}}}
(folder / "genai_config.json").write_text(json.dumps(target, indent=2))
for file in (folder / "target").glob("*token*"):
    (folder / file.name).write_bytes(file.read_bytes())

model = engine.Model(str(folder))
tokenizer = engine.Tokenizer(model)
params = engine.GeneratorParams(model)
params.set_search_options(max_length=128)
params.set_speculative_options(max_draft_tokens={launched_gamma(pair, "onnx")}, min_adaptive_k=0)
generator = engine.Generator(model, params)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
print(generator.get_speculative_stats())
"""
    name = "ONNX Runtime GenAI's builder (onnxruntime-genai, onnx and onnx-ir)"
    return {
        "convert.sh": converter(name, commands, name="onnx"),
        "generate.py": remarks(pair, "onnx") + code,
    }


LAUNCHES: dict[str, Callable[[Pair], dict[str, str]]] = {
    "hf": hf,
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "onnx": onnx,
}
