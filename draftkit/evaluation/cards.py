"""The README of a model's folder: what it is, its numbers with their definitions, how to use it.

Renders summaries; computes nothing.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.artifacts import processor
from draftkit.evaluation.engines import best_gamma_of
from draftkit.evaluation.report import (
    MODES,
    TAU,
    interval,
    kept_ids_text,
    sample_text,
    sampling_text,
    signed,
    speedup_text,
    verdict_text,
)
from draftkit.models.parallel import PARD

ONE_PASS = (
    "The drafter proposes all tokens in one pass over mask tokens (PARD). Of these engines vLLM "
    "does so; the others load it as a plain drafter, which proposes token by token: slower, and as "
    "exact.\n\n"
)
# The engines that a card serves the drafter with, in its order.
SERVED = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "hf": "transformers"}


def model_card(
    judged: dict[str, Any],
    hardware: dict[str, Any],
    *,
    target: str | None,
    name: str,
) -> str:
    """The card of a judged drafter.

    judged: the summary of its evaluation. target: the folder or hub name of its target; a folder is
    not named, since a card goes where the model goes. name: of the experiment.
    """
    target = hub_name(target)
    best = {engine: best_gamma_of(judged, engine) for engine in SERVED}
    parallel = judged.get("kind") == PARD
    gain = signed(judged["alpha_gain"]) if "alpha_gain" in judged else "not measured"
    machine = ", ".join([*hardware["gpu"], processor(hardware)])
    rows = {
        MODES["alpha"]: interval(judged["alpha"]),
        "gain over the drafter it started from": gain,
        TAU: interval(judged["acceptance_length"], 2),
        "speedup of the rounds, measured": speedup_text(judged),
        "speedup of the rounds, predicted": f"{judged['speedup']['predicted']:.2f}",
        "speedup end to end": interval(judged["speedup"]["end_to_end"], 2),
        "verdict": verdict_text(judged),
    }
    engines = "".join(
        f"| {row['engine']} | {row['setting']} | {row['gamma']} "
        f"| {row['acceptance']['mean']:.3f} | {interval(row['acceptance_length'], 2)} |\n"
        for row in judged.get("engines", ())
    )
    return (
        f"{_front(target)} Trained and judged by draftkit (experiment {name}) on held-out text: "
        f"means, {sample_text(judged['alpha'])}, "
        f"{sampling_text(judged['sampling'])}, gamma {judged['gamma']}, "
        f"batch {judged['batch_size']}, in draftkit's own decoder.\n\n"
        "| | |\n|---|---|\n"
        + "".join(f"| {label} | {text} |\n" for label, text in rows.items())
        + f"\nMeasured on: {machine}. p: the target's probabilities, q: the drafter's, both as "
        "served.\n"
        + (
            "\n## In your engine\n\n"
            "Engines draft and verify in different ways, so each accepts another share. Computed "
            "from the same texts, not run; each engine's default comes first. "
            f"{kept_ids_text(judged)}\n\n"
            "| engine | how it drafts | gamma | accepts | tokens a pass |\n|---|---|---|---|---|\n"
            + engines
            if engines
            else ""
        )
        + "\nThe drafter is this folder, here called DRAFT. The best gamma, by the acceptance of "
        "each engine and the costs of draftkit's decoder, where 0 is not to speculate: "
        + ", ".join(f"{name} {best[engine]}" for engine, name in SERVED.items())
        + ".\n\n"
        + serving(
            target or "TARGET",
            "DRAFT",
            {one: max(gamma, 1) for one, gamma in best.items()},
            parallel=parallel,
        )
    )


def plain_card(target: str | None, gamma: int, *, parallel: bool = False) -> str:
    """The card of a drafter that has not been judged; a folder of the target is not named."""
    target = hub_name(target)
    return (
        f"{_front(target)} Its acceptance has not been measured: `draftkit evaluate` does.\n\n"
        "The drafter is this folder, here called DRAFT.\n\n"
        + serving(target or "TARGET", "DRAFT", dict.fromkeys(SERVED, gamma), parallel=parallel)
    )


def hub_name(target: str | None) -> str | None:
    """`target` where it is a name on the hub, and no folder or file of this machine."""
    if target is None or Path(target).exists() or Path(target).is_absolute():
        return None
    return target


def _front(target: str | None) -> str:
    """What the hub reads of a card, its title, and what the model is for."""
    base = f"base_model: {json.dumps(target)}\n" if target else ""
    return (
        f"---\nlibrary_name: transformers\n{base}tags: [speculative-decoding, draft-model]\n---\n\n"
        "# A draft model for speculative decoding\n\n"
        f"It proposes tokens that {target or 'its target'} verifies."
    )


def serving(target: str, draft: str, gammas: Mapping[str, int], *, parallel: bool = False) -> str:
    """How engines serve `draft` beside `target`, each with its own of `gammas` a round."""
    vllm = json.dumps(vllm_options(draft, gammas["vllm"], parallel=parallel))
    sglang = sglang_options(draft, gammas["sglang"])
    llamacpp = llamacpp_options(gammas["llamacpp"])
    return f"""\
{ONE_PASS * parallel}vLLM:

    vllm serve {target} --speculative-config '{vllm}'

SGLang:

    python -m sglang.launch_server --model-path {target} {shlex.join(sglang[:2])} \\
        {shlex.join(sglang[2:6])} \\
        {shlex.join(sglang[6:])}

llama.cpp, both folders converted by its `convert_hf_to_gguf.py`:

    llama-server -m target.gguf -md draft.gguf {shlex.join(llamacpp[:2])} \\
        {shlex.join(llamacpp[2:])}

transformers:

```python
{transformers_code(json.dumps(target), json.dumps(draft), gammas["hf"])}```
"""


def vllm_options(draft: str, gamma: int, *, parallel: bool = False) -> dict[str, Any]:
    """vLLM's `--speculative-config`: proposals that are sampled, and judged as such.

    parallel: all in one pass, by a drafter whose config.json names a `pard_token`.
    """
    return {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": gamma,
        "draft_sample_method": "probabilistic",
        **({"parallel_drafting": True} if parallel else {}),
    }


def sglang_options(draft: str, gamma: int) -> list[str]:
    """SGLang's options for a drafter that is a model of its own."""
    steps = ["--speculative-num-steps", str(gamma)]
    chain = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(gamma + 1)]
    path = ["--speculative-draft-model-path", draft]
    return ["--speculative-algorithm", "STANDALONE", *path, *steps, *chain]


def llamacpp_options(gamma: int) -> list[str]:
    """llama.cpp's options beside both files: always `gamma` proposals, however likely."""
    proposals = ["--spec-draft-n-max", str(gamma), "--spec-draft-p-min", "0"]
    return ["--spec-type", "draft-simple", *proposals]


def transformers_code(target: str, draft: str, gamma: int, revision: str | None = None) -> str:
    """A program for transformers; `target` and `draft` are expressions of Python."""
    pinned = f"{target}, revision={json.dumps(revision)}" if revision else target
    return f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({pinned})
target = AutoModelForCausalLM.from_pretrained({pinned})
draft = AutoModelForCausalLM.from_pretrained({draft})
draft.generation_config.num_assistant_tokens = {gamma}
draft.generation_config.assistant_confidence_threshold = 0
inputs = tokenizer("Once upon a time", return_tensors="pt")
answer = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
print(tokenizer.decode(answer[0]))
"""
