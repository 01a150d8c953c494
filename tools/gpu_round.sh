#!/usr/bin/env bash
# All that a GPU can tell ddpsim, in eight minutes, without a network.
#
#   tools/gpu_round.sh [FOLDER] [--seconds N] [--only PART,PART] [--failed SUMMARY]
#   tools/gpu_round.sh [FOLDER] --only models --seconds 580
#
# The second form measures steps of 30 models, as long as it takes: call it again with the same
# FOLDER until it says that none is missing. timm, transformers and torchvision must be there; with
# DEVICE=cpu it needs no GPU, to try it.
#
# FOLDER (default: $OUT) takes every file. Each part has its own limit, a share of N (default: 480),
# and the next runs whatever became of it; FOLDER/summary.tsv says so: part, exit code, seconds.
# --only runs the named parts; --failed those that a summary of an earlier round calls failed.
# $PYTHON (default: python3) has torch. Wheels of ddpsim's dependencies are taken from $WHEELS
# (default: wheels/ here), into a folder of their own; nothing is installed.
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/wheels}
folder=${OUT:-} seconds=480 only=""

fail() {
    echo "gpu_round: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --seconds | --only | --failed) [ $# -gt 1 ] || fail "$1 needs a value" ;;&
    --seconds) seconds=$2 && shift ;;
    --only) only=$2 && shift ;;
    --failed)
        [ -r "$2" ] || fail "no such file: $2"
        only=$(awk -F'\t' '$2 != 0 { print $1 }' "$2" | paste -sd,) && shift
        [ -n "$only" ] || { echo "gpu_round: nothing failed in $1" && exit 0; }
        ;;
    -*) fail "unknown option $1" ;;
    *) folder=$1 ;;
    esac
    shift
done
[ -n "$folder" ] || fail "name the folder that takes the files, or set OUT"
[ "$seconds" -gt 0 ] 2>/dev/null || fail "--seconds $seconds: wanted a whole number from 1"
mkdir -p "$folder" || fail "$folder cannot be made"
folder=$(cd "$folder" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$root:$site${PYTHONPATH:+:$PYTHONPATH}"
cd "$root" || exit 1

# part NAME LIMIT COMMAND...: LIMIT seconds of a round of 480, and no more than what is left
part() {
    local name=$1 limit=$(($2 * seconds / 480 + 1)) left=$((seconds - SECONDS)) began=$SECONDS rc
    shift 2
    case ",$only," in
    ,, | *",$name,"*) ;;
    *) [ "$name" = install ] || return 0 ;; # which all others need
    esac
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 1 ]; then
        rc=124
        echo "no time was left" >"$folder/$name.log"
    else
        timeout -k 5 "$limit" "$@" >"$folder/$name.log" 2>&1
        rc=$?
    fi
    printf '%s\t%s\t%s\n' "$name" "$rc" "$((SECONDS - began))" >>"$folder/summary.tsv"
    echo "$name: exit code $rc after $((SECONDS - began)) s"
}

install() {
    [ -d "$wheels" ] || { echo "no wheels in $wheels: the dependencies must be there"; return 0; }
    "$python" -m pip install --no-index --no-deps --target "$site" "$wheels"/*.whl
}

machine() {
    nvidia-smi -q
    nvidia-smi topo -m
    "$python" -c 'import torch; print(torch.__config__.show(), torch.cuda.is_available())'
}

share() {
    echo $(($1 * seconds / 480))
}

export -f install machine
export python wheels site
calibrate=("$python" -m calibrate)
zoo=calibrate.measure.zoo.models

# resumed FILE: --resume where an earlier round left one
resumed() {
    [ ! -s "$folder/$1" ] || echo --resume
}

# named NAME...: a part of its own round, which runs only if --only or --failed names it
named() {
    case ",$only," in
    *",$1,"*) part "$@" ;;
    esac
}

: >"$folder/summary.tsv"
part install 40 bash -c install
part machine 15 bash -c machine
part doctor 20 "${calibrate[@]}" doctor
part device 225 "${calibrate[@]}" device -o "$folder/device-record.json" \
    --time-budget-s "$(share 195)" $(resumed device-record.json)
for model in resnet50 vit_b_16 gpt2; do
    part "profile-$model" 25 "${calibrate[@]}" profile "$zoo:$model" --iterations 10 \
        -o "$folder/$model.json"
done
part measure 45 "${calibrate[@]}" measure --local 1 -o "$folder/measure.json" \
    --time-budget-s "$(share 35)" $(resumed measure.json)
part tests 60 "$python" -m pytest -q -rs -p no:cacheprovider \
    tests/calibrate/measure/device/test_on_gpu.py
part fit 60 "${calibrate[@]}" fit-device "$folder/device-record.json" -o "$folder/device.json"
named models 480 "$python" tools/measure_models.py -o "$folder/models.jsonl" \
    --seconds "$(share 440)" --device "${DEVICE:-cuda}"
cat "$folder/summary.tsv"
