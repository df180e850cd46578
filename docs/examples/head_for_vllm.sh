#!/bin/sh
# An EAGLE-3 head on your target's hidden states, in the folder that vLLM loads.
#
#     sh docs/examples/head_for_vllm.sh TARGET FILE.jsonl [key=value ...]
#
# Needs: `make quickstart` once; a target of seven layers or more; chats or prompts (answers are not
# read: the target writes its own). For a target of 4 B weights one GPU of 80 GB.
# Took: 2 h 4 min on two slow cores of an AMD EPYC for SmolLM2-135M-Instruct and 3,072 questions.
# Result there: 2.96 tokens a pass and 1.89 times as fast in vLLM's CPU build (docs/results/smollm2.md).
set -eu
PATH="$PWD/.venv/bin:$PATH"
head="+experiment=pair name=head draft=eagle3 source=target target.path=$1 data.path=$2"
shift 2

# shellcheck disable=SC2086 # several words
for command in distill export; do
    python -m "pipelines.$command" $head "$@"
done
echo "The commands for each engine: outputs/head/export/launch.md"
