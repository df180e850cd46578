"""Runs in an environment with transformers: `generate` with an assistant, counted pass by pass.

Speaks as `tests.engines.drivers.Worker` does, and imports nothing of draftkit.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

COUNTS: list[int] = []  # accepted proposals of the passes of the present answer


def count_passes() -> None:
    """Note of every pass how many proposals it accepted: the engine has no counter of its own."""
    own = AssistedCandidateGenerator.update_candidate_strategy

    def noted(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
        COUNTS.append(int(num_matches))
        return own(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = noted


def main() -> None:
    """Answer every line of the standard input by as many lines as it has prompts."""
    setting = json.loads(sys.argv[1])
    load = {"dtype": getattr(torch, setting["dtype"])}
    target = AutoModelForCausalLM.from_pretrained(setting["target"], **load)
    # Nothing is padded; without an id for it every call warns.
    options: dict[str, Any] = {"pad_token_id": 0, "repetition_penalty": 1.0}
    if setting["draft"]:
        draft = AutoModelForCausalLM.from_pretrained(setting["draft"], **load)
        options["assistant_model"] = draft
    count_passes()
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(request["seed"])
        options["max_new_tokens"] = request["limit"]
        if request["temperature"] > 0:
            sampled = {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
            options |= {"do_sample": True, **sampled}
        else:
            options["do_sample"] = False
            options |= {"temperature": None, "top_k": None, "top_p": None}
        for prompt in request["prompts"]:
            COUNTS.clear()
            ids = torch.tensor([prompt])
            started = time.perf_counter()
            made = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
            seconds = time.perf_counter() - started
            answer = {"ids": made[0, len(prompt) :].tolist(), "seconds": seconds, "counts": COUNTS}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
