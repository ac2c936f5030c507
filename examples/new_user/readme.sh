#!/usr/bin/env bash
# README.md alone: its Python, and its commands where slipstream is installed. What would take hours is cut
# down; nothing else is changed. tests/test_examples.py holds the commands to README.
set -euo pipefail
readme=$1

slipstream demo
slipstream generate "What is gravity?"

awk '/^```python/ {on = 1; next} /^```/ {on = 0} on' "$readme" |
    sed 's/prompts=2000/prompts=8/; s/limit=8/limit=2, max_new_tokens=16/' > README.py
cat README.py
python README.py
python -c 'import slipstream; print(slipstream.BenchReport.read("bench.json"))'

slipstream serve &
server=$!
trap 'kill $server 2> /dev/null || true' EXIT
curl() { command curl --fail --silent --show-error --max-time 300 "$@"; }
until curl http://127.0.0.1:8000/health; do
    kill -0 $server
    sleep 1
done
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "What is gravity?"}]}'
kill $server
wait $server
