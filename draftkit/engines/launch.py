"""How each engine is started with an exported pair: exact options, and the acceptance to expect.

Texts alone; nothing is run and no file is written here. Options are those of vLLM 0.33, SGLang
0.5.23, llama.cpp 0.5, transformers 5.23 and ONNX Runtime GenAI 0.18. Servers listen on this machine
only, until a later --host says otherwise.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftkit.evaluation.cards import (
    llamacpp_options,
    sglang_options,
    transformers_code,
    vllm_options,
)
from draftkit.evaluation.report import interval

LOOPBACK = ["--host", "127.0.0.1"]
# The row of an evaluation's `engines` that is about the launched setting.
ROWS = {
    "hf": ("transformers", "threshold 0"),
    "vllm": ("vLLM", "probabilistic"),
    "sglang": ("SGLang", "argmax"),
    "llamacpp": ("llama.cpp", "argmax"),
    "onnx": ("ONNX Runtime", "sampled"),
}


@dataclass(frozen=True)
class Pair:
    """A pair to launch: the target's folder or name, proposals a round, and what is known of both.

    gammas: by batch size, the best gamma that was measured; 0 says not to speculate. judged: the
    summary of an evaluation, empty for none. files: the GGUF of target and draft, by `target` and
    `draft`.
    """

    target: str
    revision: str | None = None
    gamma: int = 1
    gammas: Mapping[int, int] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def best_gammas(summaries: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The best gamma of each batch size that was evaluated, ascending."""
    return dict(sorted((one["batch_size"], one["best_gamma"]) for one in summaries))


def ranges(gammas: Mapping[int, int]) -> list[list[int]]:
    """`gammas` as vLLM takes them: [from, to, gamma] by batch size.

    A size between two that were measured gets the gamma of the larger one; vLLM itself goes on with
    the last beyond it.
    """
    sizes = sorted(gammas)
    starts = [1, *(size + 1 for size in sizes)]
    return [[start, size, gammas[size]] for start, size in zip(starts, sizes, strict=False)]


def expected(pair: Pair, engine: str) -> dict[str, Any] | None:
    """What the evaluation predicts of the launched setting of `engine`; None where it does not.

    acceptance: of a proposal that is tested; acceptance_length: tokens a pass of the target, at
    `gamma` proposals.
    """
    for row in pair.judged.get("engines", ()):
        if (row["engine"], row["setting"]) == ROWS[engine]:
            at_best = row.get("at_best_gamma", {})
            length = at_best if at_best.get("gamma") == pair.gamma else row
            return {
                "temperature": pair.judged["temperature"],
                "acceptance": row["acceptance"],
                "gamma": length["gamma"],
                "acceptance_length": length["acceptance_length"],
            }
    return None


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
    for size, gamma in pair.gammas.items():
        advice = f"{gamma}" if gamma else "0, which is not to speculate"
        lines.append(f"Best gamma at batch size {size}, by draftkit's decoder: {advice}.")
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


def revision_of(pair: Pair) -> list[str]:
    return ["--revision", pair.revision] if pair.revision else []


def hf(pair: Pair) -> dict[str, str]:
    """A program beside the weights."""
    code = transformers_code(json.dumps(pair.target), "str(Path(__file__).parent)", pair.gamma)
    return {"generate.py": f"{remarks(pair, 'hf')}from pathlib import Path\n\n{code}"}


def vllm(pair: Pair) -> dict[str, str]:
    """`--speculative-config` as a file, with the table of gammas where several were measured."""
    options = vllm_options("./hf", pair.gamma)
    if len(pair.gammas) > 1:
        options["num_speculative_tokens"] = max(1, *pair.gammas.values())
        options["num_speculative_tokens_per_batch_size"] = ranges(pair.gammas)
    command = ["vllm", "serve", shlex.quote(pair.target), *map(shlex.quote, revision_of(pair))]
    command += [*LOOPBACK, "--speculative-config", '"$(cat vllm/speculative_config.json)"']
    return {
        "speculative_config.json": json.dumps(options, indent=2) + "\n",
        "launch.sh": script(pair, "vllm", command, name="vLLM"),
    }


def sglang(pair: Pair) -> dict[str, str]:
    """The drafter as a model of its own (STANDALONE)."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", pair.target]
    words += [*revision_of(pair), *LOOPBACK, *sglang_options("./hf", pair.gamma)]
    return {"launch.sh": script(pair, "sglang", [*map(shlex.quote, words)], name="SGLang")}


def llamacpp(pair: Pair) -> dict[str, str]:
    """llama-server on both files; where the target has none here, TARGET names it."""
    own = "target" in pair.files
    target = f"llamacpp/{pair.files['target']}" if own else '"${TARGET:?the GGUF of the target}"'
    command = ["llama-server", "-m", target, "-md", f"llamacpp/{pair.files['draft']}", *LOOPBACK]
    command += llamacpp_options(pair.gamma)
    return {"launch.sh": script(pair, "llamacpp", command, name="llama.cpp")}


def onnx(pair: Pair) -> dict[str, str]:
    """A program beside genai_config.json, which prints the engine's own counts."""
    code = f"""\
from pathlib import Path

import onnxruntime_genai as engine

model = engine.Model(str(Path(__file__).parent))
tokenizer = engine.Tokenizer(model)
params = engine.GeneratorParams(model)
params.set_search_options(max_length=128, do_sample=True, temperature=1.0)
params.set_speculative_options(max_draft_tokens={pair.gamma}, min_adaptive_k=0)
generator = engine.Generator(model, params)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
print(generator.get_speculative_stats())
"""
    return {"generate.py": remarks(pair, "onnx") + code}


LAUNCHES: dict[str, Callable[[Pair], dict[str, str]]] = {
    "hf": hf,
    "vllm": vllm,
    "sglang": sglang,
    "llamacpp": llamacpp,
    "onnx": onnx,
}
