#!/usr/bin/env bash
# Starts one part of the system in a container:
#
#   entrypoint.sh worker|gateway|batch|demo [more flags of that program]
#
# Settings are environment variables; compose.yaml lists them. Flags that follow the role
# come last and therefore win.
set -euo pipefail

role=${1:?role: give worker, gateway, batch or demo}
shift

need() { [[ -n ${!1:-} ]] || { echo "entrypoint: $1: not set; $2" >&2; exit 2; }; }

# The default model has random weights; the first worker makes it, the others wait.
make_default_model() {
    exec 9>"$(dirname "$MODEL")/.making-tiny-ling"
    flock 9
    [[ -e $MODEL/config.json ]] || python3 -m sglang.demo_model tiny-ling --output "$MODEL"
    exec 9>&-
}

worker() {
    need MODEL "name a model folder or hub id"
    [[ $MODEL != */tiny-ling ]] || make_default_model
    local flags=(
        --model-path "$MODEL" --host 0.0.0.0 --port 30000
        --schedule-policy routing-prefix --mamba-max-states-per-path 1
        --enable-metrics --enable-cache-report
    )
    [[ -z ${API_KEY:-} ]] || flags+=(--api-key "$API_KEY")
    [[ -z ${TENSOR_PARALLEL:-} ]] || flags+=(--tp-size "$TENSOR_PARALLEL")
    [[ -z ${TOOL_CALL_PARSER:-} ]] || flags+=(--tool-call-parser "$TOOL_CALL_PARSER")
    [[ -z ${WORKLOAD_PROFILE:-} ]] || flags+=(--hybrid-workload-profile "$WORKLOAD_PROFILE")
    exec python3 -m sglang.launch_server "${flags[@]}" "$@"
}

gateway() {
    need WORKERS "give the number of workers"
    local urls=() number
    for ((number = 0; number < WORKERS; number++)); do
        urls+=("http://worker-$number:30000")
    done
    local flags=(
        --worker-urls "${urls[@]}" --host 0.0.0.0 --port 30000
        --prometheus-port 29000 --policy lbch --lbch-load-factor "${LOAD_FACTOR:-1.25}"
    )
    [[ -z ${CONTROL_API_KEY:-} ]] || flags+=(--control-plane-api-key "$CONTROL_API_KEY")
    exec python3 -m sgl_router.launch_router "${flags[@]}" "$@"
}

# Without a tasks file the demo's 32 tasks are made. The same RUN again resumes a run.
batch() {
    need RUN "name the run's folder below /runs"
    if [[ -z ${TASKS:-} ]]; then
        TASKS=/runs/demo-tasks/tasks.jsonl
        [[ -e $TASKS ]] || python3 -m sglang_agent.demo_tasks \
            --count 32 --seed 0 --output "$(dirname "$TASKS")"
    fi
    local flags=(
        --base-url http://gateway:30000 --output "/runs/$RUN" --plain
        --metrics-host 0.0.0.0 --metrics-port 29100 --job-order caas
        --sample-concurrency "${SAMPLE_CONCURRENCY:-12}"
        --env-concurrency "${ENV_CONCURRENCY:-4}"
    )
    # Named, because a gateway without a key cannot ask workers with one what they serve.
    [[ -z ${MODEL:-} ]] || flags+=(--model "$MODEL")
    [[ -z ${TOOL_CHOICE:-} ]] || flags+=(--tool-choice "$TOOL_CHOICE")
    [[ -z ${API_KEY:-} ]] || flags+=(--api-key-env API_KEY)
    exec python3 -m sglang_agent run "$TASKS" "${flags[@]}" "$@"
}

demo() { exec python3 "$(dirname "$0")/../scripts/demo.py" "$@"; }

case $role in
    worker | gateway | batch | demo) "$role" "$@" ;;
    *)
        echo "entrypoint: role $role: unknown; allowed: worker, gateway, batch, demo" >&2
        exit 2
        ;;
esac
