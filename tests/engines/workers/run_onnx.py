"""Runs in an environment with onnxruntime-genai, on the pair that `tests.engines.onnx` wrote.

Speaks as `tests.engines.drivers.Worker` does, and imports nothing of draftkit.
"""

import importlib
import json
import sys
import time
from typing import Any


def main() -> None:
    """Answer every line of the standard input by as many lines as it has prompts."""
    setting = json.loads(sys.argv[1])
    engine: Any = importlib.import_module("onnxruntime_genai")
    model = engine.Model(setting["target"])
    print(json.dumps({"version": engine.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        for row, prompt in enumerate(request["prompts"]):
            params = engine.GeneratorParams(model)
            options = {
                "max_length": len(prompt) + request["limit"],
                "do_sample": request["temperature"] > 0,
                "temperature": request["temperature"] or 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "random_seed": (request["seed"] * 1_000_003 + row) % 2**31,
            }
            params.set_search_options(**options)
            if setting["draft"]:
                most = setting["gamma"]
                params.set_speculative_options(max_draft_tokens=most, min_adaptive_k=0)
            started = time.perf_counter()
            generator = engine.Generator(model, params)
            generator.append_tokens(prompt)
            while not generator.is_done():
                generator.generate_next_token()
            seconds = time.perf_counter() - started
            ids = [int(token) for token in generator.get_sequence(0)][len(prompt) :]
            answer = {"ids": ids, "seconds": seconds, "passes": 0, "accepted": 0}
            if setting["draft"]:
                counted = generator.get_speculative_stats()
                answer["passes"] = counted["rounds"]
                # Of the last pass it may accept what fills the answer, and discard its own token.
                whole = len(ids) == request["limit"]
                accepted = counted["draft_tokens_accepted"]
                answer["accepted"] = len(ids) - counted["rounds"] if whole else accepted
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
