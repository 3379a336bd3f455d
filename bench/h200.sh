#!/usr/bin/env bash
# An older kvferry and this one on one card, in turn, with their rivals.
#
#     git archive fb185655 src | tar x --one-top-level=old     # the last one before the rebuild
#     bench/h200.sh old/src OUT [PYTHON]
#
# Needs one CUDA GPU and a Python with torch, Triton and vLLM 0.26 or later. OUT gets a log, a table
# and the data of each part. A part that is cut off by its limit leaves what it has measured.
#
#   call     how long `store`, `match` and `load` hold their caller; call to end
#   hooks    processor time by hook, request and step; what the engine's thread waited for
#   first    start of the engine, first tokens from host memory, and whether the bytes are right
#   bound    rounds in which loads are the bottleneck; starts, first hits and single hits
#   clients  rounds of 24 clients, with OffloadingConnector
#   copies   small and large segments against one large copy
#
# PARTS="call hooks bound" is about ten minutes, PARTS="first clients copies" as long: an engine takes
# 10 to 45 s to start, and each part starts three or four. LMCACHE=1 adds LMCacheConnectorV1 where it is installed.
set -uo pipefail
old=$(realpath "$1") out=$2 python=${3:-python3}
top=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out" && out=$(realpath "$out")
export PYTHONPATH=$top/src${PYTHONPATH:+:$PYTHONPATH}
parts=${PARTS:-call hooks first bound clients copies}
end=$((SECONDS + ${SECONDS_IN_ALL:-1100}))
failed=0

part() { # name, its limit in seconds, script and options
    local name=$1 limit=$2
    shift 2
    [[ " $parts " == *" $name "* ]] || return 0
    local left=$((end - SECONDS))
    ((left > limit)) && left=$limit
    if ((left < 20)); then
        echo "== $name: no time left"
        failed=1
        return 0
    fi
    timeout -k 5 "$left" "$python" "$top/bench/$1" "${@:2}" --json "$out/$name.json" \
        >"$out/$name.md" 2>"$out/$name.log"
    local code=$?
    ((code == 0)) || failed=1
    echo "== $name: ended with $code after $SECONDS s in all"
    cat "$out/$name.md"
}

lmcache=${LMCACHE:+--connector LMCacheConnectorV1}
part call 110 call_time.py --other "$old" --turns 1 --rounds 9
part hooks 170 vllm_hooks.py --kind returns --kind idle --other "$old" --rounds 5 --seconds 150
part bound 290 vllm_rounds.py --section bound --pool 16 --other "$old" --rounds 4 ${LMCACHE:+--lmcache}
part first 200 vllm_connectors.py --connector kvferry --connector OffloadingConnector $lmcache \
    --shape qwen7b --section start --section ttft --section bytes --rounds 1 --seconds 90
part clients 250 vllm_rounds.py --section first --conversations 24 --rounds 10
part copies 60 copy_paths.py --quick
exit $failed
