"""`python vllm_pairs.py JOBS.json`: start vLLM on pairs, and generate greedily.

A job: folder (with target/ and draft/), tensor_parallel, dtype. Its result: lengths of the answers,
counters of speculative decoding, dtypes of target and draft.
"""

import os

# One process for all of an engine, so that an error of its worker is raised here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm.model_executor.models.llama
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.qwen3
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from forking import Job, each
from vllm import LLM

PROMPTS = ([5, 6, 7, 8], [65] * 8)
TOKENS = 70  # of each answer, however soon a model ends one
LENGTH = 96
GAMMA = 2


def work(job: Job) -> Job:
    """Load a pair as anybody would, and answer under the defaults of its files, but greedily."""
    speculative = {"method": "draft_model", "model": f"{job['folder']}/draft"}
    engine = LLM(
        model=f"{job['folder']}/target",
        speculative_config={**speculative, "num_speculative_tokens": GAMMA},
        enforce_eager=True,
        dtype=job["dtype"],
        max_model_len=LENGTH,
        tensor_parallel_size=job["tensor_parallel"],
        distributed_executor_backend="uni" if job["tensor_parallel"] == 1 else "mp",
        disable_log_stats=False,
    )
    sampling = engine.get_default_sampling_params()
    sampling.temperature, sampling.max_tokens, sampling.ignore_eos = 0.0, TOKENS, True
    answers = engine.generate([{"prompt_token_ids": one} for one in PROMPTS], sampling)
    counters = {one.name: getattr(one, "value", None) for one in engine.get_metrics()}
    config = engine.llm_engine.vllm_config
    return {
        "lengths": [len(one.outputs[0].token_ids) for one in answers],
        "drafted": counters["vllm:spec_decode_num_draft_tokens"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
        "dtypes": [
            str(config.model_config.dtype),
            str(config.speculative_config.draft_model_config.dtype),
        ],
    }


each(work)
