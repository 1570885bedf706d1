#!/usr/bin/env bash
# Everything that wants two devices, in order, each with a limit:
#
#   benchmarks/two_devices.sh OUT [PART ...]
#
# PART: tests handoff exchange steps (540 s at most), mixed deaths layers (570), rooms (420); all by
# default, in this order.
# Writes a log a part, and the lines it added to benchmarks/results, into OUT. TRIAL=1 goes the same
# way on a CPU with tiny sizes and keeps no line: it finds what would fail for silly reasons.
# Python is PYTHON, python3 by default. Returns the number of parts that failed.
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
py=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # multicast is more than a virtual machine may have
failed=0

run() { # name, seconds, command...
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  rm -rf "$out/.before" && cp -r benchmarks/results "$out/.before"
  timeout -k 10 "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  for file in benchmarks/results/*.jsonl; do
    before=$(cat "$out/.before/$(basename "$file")" 2> /dev/null | wc -l)
    tail -n +$((before + 1)) "$file" > "$out/$name.$(basename "$file")"
    [ -s "$out/$name.$(basename "$file")" ] || rm "$out/$name.$(basename "$file")"
  done
  if [ -n "${TRIAL:-}" ]; then cp "$out/.before"/* benchmarks/results/; fi
  [ $status = 0 ] || failed=$((failed + 1))
  echo "== $name: status $status after $((SECONDS - began)) s of at most $limit"
  tail -n 12 "$out/$name.log" | cut -c 1-300
}

bench() { # name, seconds, module and options on two devices, options of a trial
  local name=$1 limit=$2 real=$3 trial=$4
  if [ -n "${TRIAL:-}" ]; then real=$trial; fi
  # shellcheck disable=SC2086 # options are words
  run "$name" "$limit" $py -m $real
}

part() {
  case $1 in
    tests) # of files that name the mark: others may want what is not installed here
      # shellcheck disable=SC2046
      run tests 150 $py -m pytest -q -m multigpu $(grep -rl --include='test_*.py' multigpu tests) ;;
    handoff) bench handoff 120 "benchmarks.handoff --devices 2" \
      "benchmarks.handoff --devices 2 --small --tokens 256 1024" ;;
    exchange) bench exchange 120 "benchmarks.exchange --devices 2 --out $out/exchange-lines.jsonl" \
      "benchmarks.exchange --devices 0 --rows 1 8 --layer-rows 64 --out $out/exchange-lines.jsonl" ;;
    steps) bench steps 150 "benchmarks.handoff_busy --devices 2" \
      "benchmarks.handoff_busy --devices 2 --small" ;;
    mixed) bench mixed 330 "benchmarks.mixed --devices 2" \
      "benchmarks.mixed --devices 0 --small --seconds 3 --rates 2" ;;
    rooms) bench rooms 420 "benchmarks.device_rooms --devices 2" \
      "benchmarks.device_rooms --devices 0 --dtype float32" ;;
    deaths) run deaths 120 $py -m pytest -q tests/integration/test_device_deaths.py \
      -k "$([ -n "${TRIAL:-}" ] && echo cpu || echo cuda)" ;;
    layers) bench layers 120 "benchmarks.handoff_layers --devices 2" \
      "benchmarks.handoff_layers --devices 2 --small --tokens 256 1024" ;;
    *) echo "no part is called $1"; failed=$((failed + 1)) ;;
  esac
}

for name in ${@:-tests handoff exchange steps mixed deaths layers rooms}; do part "$name"; done
rm -rf "$out/.before"
exit $failed
