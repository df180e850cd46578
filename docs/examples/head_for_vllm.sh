#!/bin/sh
# An EAGLE-3 head on your target's hidden states, in the folder that vLLM loads.
#
#     sh docs/examples/head_for_vllm.sh TARGET FILE.jsonl [key=value ...]
#
# Needs: `make quickstart` once; a target of seven layers or more; chats or prompts (answers are not
# read: the target writes its own). For a target of 4 B weights one GPU of 80 GB.
# As it stands it takes 300 steps on up to 1,536 answers; that has not been timed. For one of the
# size below append optim.max_steps=5400 generate.rollouts=3072 divergence.warmup_steps=3800.
# Took: 2 h 4 min on two slow cores of an AMD EPYC for SmolLM2-135M-Instruct, with the settings of
# `+experiment=smollm2_135m` (5,400 steps) on 3,072 answers to questions of GSM8K.
# Result there: 2.96 tokens a pass and 1.89 times as fast in vLLM's CPU build (docs/results/smollm2.md).
set -eu
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
target=$1 file=$2
shift 2
set -- +experiment=pair name=head draft=eagle3 "target.path=$target" "data.path=$file" "$@"

python -m pipelines.distill "$@"
python -m pipelines.export "$@"
echo "The commands for each engine: launch.md beside the folder that export has named"
