#!/bin/sh
# Three divergences on one pair, compared by prompt: which one is surely better?
#
#     sh docs/examples/sweep.sh TARGET DRAFT FILE.jsonl [key=value ...]
#
# Needs: as own_pair.sh. Texts and the target's answers are made once, for all three.
# Took: 62 minutes on two cores of an AMD EPYC for the story pair of docs/distillspec.md, whose sweep
# goes over sources too.
# Result there: TVD adds 0.027 of alpha over plain training, which this script does not run; TVD and
# JSD on the target's texts lead.
set -eu
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
target=$1 draft=$2 file=$3
shift 3

python -m pipelines.distill -m +experiment=pair name=sweep divergence=forward_kl,jsd,tvd \
    "target.path=$target" "draft.path=$draft" "data.path=$file" "$@"
python -m pipelines.compare 'runs=[outputs/sweep]'
