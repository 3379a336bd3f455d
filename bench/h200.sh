#!/usr/bin/env bash
# An older kvferry and this one on one card, in turn, with their rivals: in ten minutes at most.
#
#     git archive fb185655 src | tar x --one-top-level=old     # the last one before the rebuild
#     bench/h200.sh old/src OUT [PYTHON]
#
# Needs one CUDA GPU and a Python with torch, Triton and vLLM 0.26 or later. OUT gets a log, a table
# and the data of each part. A part that is cut off by its limit leaves what it has measured.
#
#   call     how long `store`, `match` and `load` hold their caller; call to `Done`
#   hooks    processor time by hook, request and step; what the engine's thread waited for
#   first    start of the engine, first tokens from host memory, and whether the bytes are right
#   bound    rounds in which loads are the bottleneck
#   clients  rounds of 24 clients, with OffloadingConnector
#   copies   segments of 1,234 bytes and of 16 KiB against one large copy
#
# PARTS="call bound" chooses. LMCACHE=1 adds LMCacheConnectorV1 where it is installed.
set -uo pipefail
old=$(realpath "$1") out=$2 python=${3:-python3}
top=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out" && out=$(realpath "$out")
export PYTHONPATH=$top/src${PYTHONPATH:+:$PYTHONPATH}
parts=${PARTS:-call hooks first bound clients copies}
end=$((SECONDS + ${SECONDS_IN_ALL:-590}))
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
part call 130 call_time.py --other "$old" --turns 1 --rounds 9
part hooks 130 vllm_hooks.py --kind returns --kind idle --other "$old" --rounds 4 --seconds 100
part bound 110 vllm_rounds.py --section bound --other "$old" --rounds 3 ${LMCACHE:+--lmcache}
part first 120 vllm_connectors.py --connector kvferry --connector OffloadingConnector $lmcache \
    --shape qwen7b --section start --section ttft --section bytes --rounds 1 --seconds 90
part clients 120 vllm_rounds.py --section first --other "$old" --rounds 3
part copies 60 copy_paths.py --segments 1234,16384
exit $failed
