#!/bin/sh
# A drafter that follows the traffic of a running vLLM: a recording proxy, and the daemon that pushes.
#
#     sh docs/examples/loop.sh TARGET DRAFT FILE.jsonl [key=value ...]
#
# Needs: vLLM at port 8000 as docs/loop.md starts it (development mode, one file of draftkit beside it);
# DRAFT is the drafter that it was started with, before export. Clients ask port 8001.
# Took: 12 minutes from the start to the figure of docs/loop.md, on two cores of an AMD EPYC.
# Result there: 1.19 to 1.52 tokens a pass on new traffic, all answers the same.
set -eu
PATH="$PWD/.venv/bin:$PATH"
loop="+experiment=serve_pair target.path=$1 draft.path=$2 data.path=$3 engine.url=http://127.0.0.1:8000"
shift 3

# shellcheck disable=SC2086 # several words
{
    python -m pipelines.capture $loop "$@" &
    trap 'kill $! 2> /dev/null || true' EXIT
    python -m pipelines.online $loop 'target.urls=[http://127.0.0.1:8000]' generate.top_k=64 \
        online.push=vllm "$@"
}
