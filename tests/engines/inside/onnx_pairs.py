"""`python onnx_pairs.py JOBS.json`: build pairs for ONNX Runtime GenAI, or run built ones.

A job: folder (with target/ and draft/), step. `build` makes onnx/target and onnx/draft; `run`, once
there is one onnx/genai_config.json of both, generates greedily. Its result: lengths of the texts,
counters of speculative decoding.
"""

import runpy
import sys

import onnxruntime_genai
import torch  # noqa: F401
import transformers  # noqa: F401
from forking import Job, each

BUILDER = "onnxruntime_genai.models.builder"
PROMPTS = ([5, 6, 7, 8], [65] * 8)
LENGTH = 80  # of prompt and answer


def build(folder: str) -> Job:
    """What `python -m onnxruntime_genai.models.builder` does, without its imports for each."""
    for name in ("target", "draft"):
        words = ["-i", f"{folder}/{name}", "-o", f"{folder}/onnx/{name}"]
        sys.argv = [BUILDER, *words, "-p", "fp32", "-e", "cpu", "-c", f"{folder}/cache"]
        runpy.run_module(BUILDER, run_name="__main__", alter_sys=True)
    return {}


def run(folder: str) -> Job:
    """Load the joint folder, and extend each prompt to its full length."""
    model = onnxruntime_genai.Model(f"{folder}/onnx")
    lengths, drafted, accepted = [], 0, 0
    for prompt in PROMPTS:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=LENGTH, min_length=LENGTH)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
        lengths.append(len(generator.get_sequence(0)))
        stats = generator.get_speculative_stats()
        drafted += stats["draft_tokens_evaluated"]
        accepted += stats["draft_tokens_accepted"]
    return {"lengths": lengths, "drafted": drafted, "accepted": accepted}


def work(job: Job) -> Job:
    return {"build": build, "run": run}[job["step"]](job["folder"])


each(work)
