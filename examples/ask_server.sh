#!/usr/bin/env bash
# Starts a server on the small model, asks it three things with curl, and stops it.
set -euo pipefail
BIN=${BIN:-.venv/bin}
log=$(mktemp)
"$BIN/outboard" serve openvino --port 0 --restart on-failure --log-level warning >"$log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true; rm -f "$log"' EXIT
until grep -q serving "$log"; do
    kill -0 $server # it ended: its own words say why
    sleep 0.2
done
cat "$log"
url=$(grep -o 'http://[^/]*' "$log" | head -1)

echo; echo "\$ curl $url/v1/models"
curl --silent --fail "$url/v1/models"
echo; echo; echo "\$ curl $url/v1/chat/completions"
curl --silent --fail "$url/v1/chat/completions" --header 'content-type: application/json' --data '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0}'
echo; echo; echo "\$ curl $url/v1/completions, streamed"
curl --silent --fail --no-buffer "$url/v1/completions" --header 'content-type: application/json' --data '{
  "prompt": "The sea is", "max_tokens": 8, "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}'
