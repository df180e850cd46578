#!/bin/sh
# Your own target and drafter on your own prompts: does it fit, train and judge, write it for engines.
#
#     sh docs/examples/own_pair.sh TARGET DRAFT FILE.jsonl [key=value ...]
#
# Needs: `make quickstart` once; two models that share a vocabulary; a file of chats or prompts.
# Took: 5 minutes on two cores of an AMD EPYC for bitllama-3M (3 M weights), stories260K and 1,000
# stories, with data.max_length=128 evaluate.max_new_tokens=64 decode.gamma=4.
# Result: alpha 0.751 to 0.793, and the verdict "do not deploy": a pass of that drafter costs too much.
set -eu
PATH="$PWD/.venv/bin:$PATH"
pair="+experiment=pair target.path=$1 draft.path=$2 data.path=$3"
shift 3

# shellcheck disable=SC2086 # several words
for command in check distill export; do
    python -m "pipelines.$command" $pair "$@"
done
