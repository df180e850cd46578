"""The README of a model's folder: what it is, its page in short, how engines serve it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.evaluation.decision import decision_page
from draftkit.evaluation.engines import best_gamma_of
from draftkit.evaluation.page import as_markdown
from draftkit.models.parallel import ENCODER_DECODER, PARD, PLAIN

ONE_PASS = (
    "The drafter proposes all tokens in one pass over mask tokens (PARD). Of these engines vLLM "
    "does so; the others load it as a plain drafter, which proposes token by token: slower, and as "
    "exact.\n\n"
)
NO_ENGINE = (
    "vLLM, SGLang, llama.cpp and ONNX Runtime serve no encoder-decoder pair; draftkit's own server "
    "does.\n\n"
)
# The engines that a card serves the drafter with, in its order.
SERVED = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "hf": "transformers"}


def model_card(judged: dict[str, Any], *, target: str | None, name: str) -> str:
    """The card of a judged drafter: its page in short, and how engines serve it.

    judged: the summary of its evaluation. target: the folder or hub name of its target; a folder is
    not named, since a card goes where the model goes. name: of the experiment.
    """
    engines = served_by(judged.get("kind"))
    best = {engine: best_gamma_of(judged, engine) for engine in engines}
    gammas = {one: max(gamma, 1) for one, gamma in best.items()}
    named = ", ".join(f"{name} {best[engine]}" for engine, name in engines.items())
    return (
        _front(target)
        + as_markdown(decision_page(judged, name=name))
        + f"\n## Use\n\n{_folder(target)} The best gamma, by the acceptance of each engine and the "
        f"costs of draftkit's decoder, where 0 is not to speculate: {named}.\n\n"
        + serving(
            hub_name(target) or "TARGET", "DRAFT", gammas, parallel=judged.get("kind") == PARD
        )
    )


def served_by(kind: str | None) -> dict[str, str]:
    """The engines that serve a drafter of `kind`: `ENCODER_DECODER`, or one of `draft.kind`."""
    return {"hf": SERVED["hf"]} if kind == ENCODER_DECODER else SERVED


def plain_card(target: str | None, gamma: int, *, kind: str = PLAIN) -> str:
    """The card of a drafter that has not been judged; a folder of the target is not named."""
    gammas = dict.fromkeys(served_by(kind), gamma)
    return (
        f"{_front(target)}# A draft model for speculative decoding\n\n{_folder(target)} "
        "Its acceptance has not been measured: `draftkit evaluate` does.\n\n"
        + serving(hub_name(target) or "TARGET", "DRAFT", gammas, parallel=kind == PARD)
    )


def hub_name(target: str | None) -> str | None:
    """`target` where it is a name on the hub, and no folder or file of this machine."""
    if target is None or Path(target).exists() or Path(target).is_absolute():
        return None
    return target


def _front(target: str | None) -> str:
    """What the hub reads of a card."""
    base = f"base_model: {json.dumps(hub_name(target))}\n" if hub_name(target) else ""
    tags = "tags: [speculative-decoding, draft-model]"
    return f"---\nlibrary_name: transformers\n{base}{tags}\n---\n\n"


def _folder(target: str | None) -> str:
    verified = hub_name(target) or "its target"
    return f"This folder, here called DRAFT, proposes tokens that {verified} verifies."


def serving(target: str, draft: str, gammas: Mapping[str, int], *, parallel: bool = False) -> str:
    """How engines serve `draft` beside `target`, each with its own of `gammas` a round."""
    code = transformers_code(
        json.dumps(target), json.dumps(draft), gammas["hf"], seq2seq=[*gammas] == ["hf"]
    )
    transformers = f"transformers:\n\n```python\n{code}```\n"
    if [*gammas] == ["hf"]:
        return NO_ENGINE + transformers
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

{transformers}"""


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


def transformers_code(
    target: str, draft: str, gamma: int, revision: str | None = None, *, seq2seq: bool = False
) -> str:
    """A program for transformers; `target` and `draft` are expressions of Python."""
    loader = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
    pinned = f"{target}, revision={json.dumps(revision)}" if revision else target
    return f"""\
from transformers import {loader}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({pinned})
target = {loader}.from_pretrained({pinned})
draft = {loader}.from_pretrained({draft})
draft.generation_config.num_assistant_tokens = {gamma}
draft.generation_config.assistant_confidence_threshold = 0
inputs = tokenizer("Once upon a time", return_tensors="pt")
answer = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)
print(tokenizer.decode(answer[0]))
"""
