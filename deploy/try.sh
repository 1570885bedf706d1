#!/usr/bin/env bash
# A new operator's path on one machine, with the files and commands of a cluster: install, serve two
# replicas a stage, load, scale, kill, upgrade, look at the dashboards, stop. No request may be lost.
#   deploy/try.sh              in a new virtual environment (minutes of downloading)
#   deploy/try.sh --venv DIR   in one that has everything
# Everything listens on loopback, on free ports, and is gone afterwards. Prometheus is asked for the
# panels' data where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d /tmp/baton-try.XXXXXX)
venv=$work/venv children=() began=$SECONDS step_began=$SECONDS step=""
case "${1:-}" in
  --venv) venv=$(realpath -s "$2") ;;
  "") ;;
  *) sed -n '2,7s/^# //p' "$0"; exit 2 ;;
esac

say() { printf '%-10s %3d s  %s\n' "$step" $((SECONDS - step_began)) "$*"; }
begin() { step=$1 step_began=$SECONDS; }
fail() { say "FAILED: $*"; exit 1; }
trial() { "$venv/bin/python" -m deploy.trial "$@"; }

# Processes that carry our mark; those that Ray started have no parent of ours.
marked() {
  grep -lsz "^BATON_TRY=$work$" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 | grep -vx "$$" || true
}

finish() {
  local status=$? left
  for child in "${children[@]}"; do kill "$child" 2>/dev/null || true; done
  wait
  left=$(marked)
  for pid in $left; do kill -KILL "$pid" 2>/dev/null || true; done
  if [ "$status" = 0 ] || [ ! -e "$work/ray" ]; then
    rm -rf "$work"
  else
    rm -rf "$work/venv"
    echo "logs: $work/ray/session_latest/logs"
  fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

begin install
if [ "$venv" = "$work/venv" ]; then
  make -s install VENV="$venv" >"$work/install.log" 2>&1 || { tail "$work/install.log"; fail "see above"; }
fi
[ -x "$venv/bin/python" ] || fail "$venv is no virtual environment"
say "$("$venv/bin/python" -c 'import ray, torch; print(f"torch {torch.__version__}, ray {ray.__version__}")')"

begin serve
read -r http admin gcs dashboard metrics agent client prometheus < <("$venv/bin/python" - <<'PORTS'
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
print(*[one.getsockname()[1] for one in held])
PORTS
)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN; RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_ADDRESS=127.0.0.1:$gcs RAY_DASHBOARD_ADDRESS=http://127.0.0.1:$dashboard
export RAY_USAGE_STATS_ENABLED=0 RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S=1
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
ports=(--port "$http" --admin-port "$admin")
BATON_TRY=$work "$venv/bin/ray" start --head --block --node-ip-address=127.0.0.1 --port="$gcs" \
  --dashboard-host=127.0.0.1 --dashboard-port="$dashboard" --metrics-export-port="$metrics" \
  --dashboard-agent-listen-port="$agent" --ray-client-server-port="$client" \
  --temp-dir="$work/ray" --object-store-memory=100000000 --num-cpus=2 \
  --resources='{"router": 4, "encoder": 4, "prefill": 6, "decode": 4}' \
  >"$work/ray.log" 2>&1 &
ray=$!
children+=("$ray")
trial files "$work" "${ports[@]}"
for _ in $(seq 60); do
  if "$venv/bin/serve" deploy "$work/serve.yaml" >"$work/deploy.log" 2>&1; then break; fi
  kill -0 "$ray" || fail "$(tail -5 "$work/ray.log")"
  sleep 1
done
counts=$(trial settled)
until curl -sf "http://127.0.0.1:$http/ready" >/dev/null; do sleep 0.2; done
say "$counts, ready at http://127.0.0.1:$http"

begin load
scraper=""
if command -v prometheus >/dev/null; then
  sed "s/127.0.0.1:8001/127.0.0.1:$admin/; s/: 5s/: 1s/" deploy/monitoring/prometheus.yml >"$work/prometheus.yml"
  cp deploy/monitoring/alerts.yml "$work"
  BATON_TRY=$work prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/data" \
    --web.listen-address="127.0.0.1:$prometheus" --log.level=error 2>"$work/prometheus.log" &
  children+=($!) scraper=http://127.0.0.1:$prometheus
fi
BATON_TRY=$work "$venv/bin/python" -m deploy.trial load "http://127.0.0.1:$http" "$work/report.json" &
crowd=$!
children+=("$crowd")
sleep 5
say "3 clients ask, one of them about a picture; they go on until the end"

begin scale
trial files "$work" "${ports[@]}" --prefill 3
"$venv/bin/serve" deploy "$work/serve.yaml" >"$work/deploy.log" 2>&1
counts=$(trial settled --prefill 3)
say "$counts"
trial files "$work" "${ports[@]}"
"$venv/bin/serve" deploy "$work/serve.yaml" >"$work/deploy.log" 2>&1
counts=$(trial settled)
say "$counts again"

begin kill
read -r victim _ < <(trial pids Decode)
kill -KILL "$victim"
counts=$(trial settled --gone "$victim")
say "$counts without process $victim"

begin upgrade
before=$(trial pids all | tr '\n' ' ')
trial files "$work" "${ports[@]}" --slots 6 --release 2
"$venv/bin/serve" deploy "$work/serve.yaml" >"$work/deploy.log" 2>&1
counts=$(trial settled --gone "$before")
slots=$(curl -s "http://127.0.0.1:$admin/metrics" |
  sed -n 's/^baton_total_slots{.*room="decode".*} //p' | sort -u | xargs)
say "$counts, none of the old ones, decode has $slots slots"

begin look
sleep 3
trial look "http://127.0.0.1:$admin" "$scraper" >"$work/look.log" 2>&1 \
  || fail "$(cat "$work/look.log")"
while read -r line; do say "$line"; done <"$work/look.log"
grafana=$(sed -n 's/^ *path: //p' "$work"/ray/session_latest/metrics/grafana/provisioning/dashboards/default.yml)
cp deploy/monitoring/grafana/dashboards/*.json "$grafana"
say "$(find "$grafana" -name 'baton-*.json' | wc -l) dashboards are where Ray's Grafana settings look"

begin stop
kill -TERM "$crowd"
wait "$crowd"
"$venv/bin/serve" shutdown -y >"$work/deploy.log" 2>&1
kill -TERM "$ray"
wait "$ray" || true
for child in "${children[@]}"; do kill "$child" 2>/dev/null || true; done
wait
for _ in $(seq 50); do left=$(marked); [ -n "$left" ] || break; sleep 0.2; done
[ -z "$left" ] || fail "these processes are left: $(ps -o pid=,args= -p "${left//$'\n'/,}" | cut -c1-200)"
"$venv/bin/python" - "$work/report.json" <<'REPORT' >"$work/stop.log" || { cat "$work/stop.log"; fail "see above"; }
import json, sys
endings = json.load(open(sys.argv[1]))
print(endings)
sys.exit(set(endings) != {"answered"} or endings["answered"] < 20)
REPORT
say "$(cat "$work/stop.log"); no process is left; $((SECONDS - began)) s in all"
