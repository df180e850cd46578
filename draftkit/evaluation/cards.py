"""The README of a model's folder: what it is, its page in short, how engines serve it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.config import PARD, PLAIN
from draftkit.evaluation.decision import decision_page
from draftkit.evaluation.engines import best_gamma_of, serves
from draftkit.evaluation.page import as_markdown
from draftkit.models.head_files import P_EAGLE
from draftkit.models.heads import EAGLE3, MEDUSA
from draftkit.models.parallel import ENCODER_DECODER

# Of a kind, what there is to know before the engines that serve it.
ABOUT = {
    PARD: "The drafter proposes all tokens in one pass over mask tokens (PARD). Of these engines "
    "vLLM does so; the others load it as a plain drafter, which proposes token by token: slower, "
    "and as exact.\n\n",
    EAGLE3: "The drafter is a head on the target's hidden states (EAGLE-3), for this target alone. "
    "transformers and ONNX Runtime load no such head.\n\n",
    P_EAGLE: "The drafter is a head on the target's hidden states that proposes all tokens in one "
    "pass (P-EAGLE), for this target alone. Of all engines vLLM loads it.\n\n",
    MEDUSA: "No engine loads Medusa heads any more; draftkit's own server does.\n\n",
    ENCODER_DECODER: "vLLM, SGLang, llama.cpp and ONNX Runtime serve no encoder-decoder pair; "
    "draftkit's own server does.\n\n",
}
# The engines that a card serves the drafter with, in its order.
SERVED = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "hf": "transformers"}


def model_card(judged: dict[str, Any], *, target: str | None, name: str) -> str:
    """The card of a judged drafter: its page in short, and how engines serve it.

    judged: the summary of its evaluation. target: the folder or hub name of its target; a folder is
    not named, since a card goes where the model goes. name: of the experiment.
    """
    kind = judged.get("kind", PLAIN)
    engines = served_by(kind)
    best = {engine: best_gamma_of(judged, engine) for engine in engines}
    gammas = {one: max(gamma, 1) for one, gamma in best.items()}
    named = ", ".join(f"{name} {best[engine]}" for engine, name in engines.items())
    costs = (
        "The best gamma, by the acceptance of each engine and the costs of draftkit's decoder, "
        f"where 0 is not to speculate: {named}."
    )
    return (
        _front(target)
        + as_markdown(decision_page(judged, name=name))
        + f"\n## Use\n\n{_folder(target)}{f' {costs}' if named else ''}\n\n"
        + serving(hub_name(target) or "TARGET", "DRAFT", gammas, kind=kind)
    )


def served_by(kind: str) -> dict[str, str]:
    """The engines of a card that serve a drafter of `kind`."""
    return {engine: name for engine, name in SERVED.items() if serves(name, kind)}


def plain_card(target: str | None, gamma: int, *, kind: str = PLAIN) -> str:
    """The card of a drafter that has not been judged; a folder of the target is not named."""
    gammas = dict.fromkeys(served_by(kind), gamma)
    return (
        f"{_front(target)}# A draft model for speculative decoding\n\n{_folder(target)} "
        "Its acceptance has not been measured: `draftkit evaluate` does.\n\n"
        + serving(hub_name(target) or "TARGET", "DRAFT", gammas, kind=kind)
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


def serving(target: str, draft: str, gammas: Mapping[str, int], *, kind: str = PLAIN) -> str:
    """How engines serve `draft` beside `target`, each with its own of `gammas` a round."""
    text = ABOUT.get(kind, "")
    if "vllm" in gammas:
        vllm = json.dumps(vllm_options(draft, gammas["vllm"], kind=kind))
        text += f"vLLM:\n\n    vllm serve {target} --speculative-config '{vllm}'\n\n"
    if "sglang" in gammas:
        sglang = sglang_options(draft, gammas["sglang"], kind=kind)
        text += f"""\
SGLang:

    python -m sglang.launch_server --model-path {target} {shlex.join(sglang[:2])} \\
        {shlex.join(sglang[2:6])} \\
        {shlex.join(sglang[6:])}

"""
    if "llamacpp" in gammas:
        llamacpp = llamacpp_options(gammas["llamacpp"], kind=kind)
        heads = ", DRAFT with `--target-model-dir TARGET`" if kind == EAGLE3 else ""
        text += f"""\
llama.cpp, both folders converted by its `convert_hf_to_gguf.py`{heads}:

    llama-server -m target.gguf -md draft.gguf {shlex.join(llamacpp[:2])} \\
        {shlex.join(llamacpp[2:])}

"""
    if "hf" in gammas:
        code = transformers_code(
            json.dumps(target), json.dumps(draft), gammas["hf"], seq2seq=kind == ENCODER_DECODER
        )
        text += f"transformers:\n\n```python\n{code}```\n"
    return f"{text.rstrip()}\n"


def vllm_options(draft: str, gamma: int, *, kind: str = PLAIN) -> dict[str, Any]:
    """vLLM's `--speculative-config`: proposals that are sampled, and judged as such.

    In one pass by kinds whose config.json names a `pard_token`.
    """
    return {
        "method": "eagle3" if kind in (EAGLE3, P_EAGLE) else "draft_model",
        "model": draft,
        "num_speculative_tokens": gamma,
        "draft_sample_method": "probabilistic",
        **({"parallel_drafting": True} if kind in (PARD, P_EAGLE) else {}),
    }


def sglang_options(draft: str, gamma: int, *, kind: str = PLAIN) -> list[str]:
    """SGLang's options for a head, or a drafter that is a model of its own."""
    algorithm = "EAGLE3" if kind == EAGLE3 else "STANDALONE"
    steps = ["--speculative-num-steps", str(gamma)]
    chain = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(gamma + 1)]
    path = ["--speculative-draft-model-path", draft]
    return ["--speculative-algorithm", algorithm, *path, *steps, *chain]


def llamacpp_options(gamma: int, *, kind: str = PLAIN) -> list[str]:
    """llama.cpp's options beside both files: always `gamma` proposals, however likely."""
    proposals = ["--spec-draft-n-max", str(gamma), "--spec-draft-p-min", "0"]
    return ["--spec-type", "draft-eagle3" if kind == EAGLE3 else "draft-simple", *proposals]


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
