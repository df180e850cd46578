#!/bin/sh
# Three divergences on one pair, compared by prompt: which one is surely better?
#
#     sh docs/examples/sweep.sh TARGET DRAFT FILE.jsonl [key=value ...]
#
# Needs: as own_pair.sh. Texts and the target's answers are made once, for all three.
# Took: DISTILLSPEC
# Result: X
set -eu
PATH="$PWD/.venv/bin:$PATH"
pair="+experiment=pair name=sweep target.path=$1 draft.path=$2 data.path=$3"
shift 3

# shellcheck disable=SC2086 # several words
python -m pipelines.distill -m $pair divergence=forward_kl,jsd,tvd "$@"
python -m pipelines.compare 'runs=[outputs/sweep]'
