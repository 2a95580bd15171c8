# Sourced by run.sh and run_smollm2.sh: runs the retriever until the script ends.

start_retriever() { # corpus port log [flags of verl.search.server …]
    local corpus=$1 port=$2 log=$3
    shift 3
    : >"$log" # create it now: the background process opens it later
    python3 -m verl.search.server --corpus_path "$corpus" --port "$port" "$@" >"$log" 2>&1 &
    RETRIEVER=$!
    trap 'kill "$RETRIEVER" 2>/dev/null || true; wait "$RETRIEVER" 2>/dev/null || true' EXIT
    for _ in $(seq 600); do
        if python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=1)" 2>/dev/null; then
            tail -n 1 "$log"
            return
        fi
        kill -0 "$RETRIEVER" 2>/dev/null || { cat "$log" >&2; exit 1; }
        sleep 1
    done
    echo "the retriever was not ready within 10 minutes; see $log" >&2
    exit 1
}
