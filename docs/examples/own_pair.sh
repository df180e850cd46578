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
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
target=$1 draft=$2 file=$3
shift 3
set -- +experiment=pair "target.path=$target" "draft.path=$draft" "data.path=$file" "$@"

python -m pipelines.check "$@"
python -m pipelines.distill "$@"
python -m pipelines.export "$@"
