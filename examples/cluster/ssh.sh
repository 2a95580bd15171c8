#!/usr/bin/env bash
# Machines reached by ssh, without a scheduler. The repository and its environment have the same path on all of them.
#   HOSTS="10.0.0.1 10.0.0.2" bash examples/cluster/ssh.sh start [key=value …]     all nodes
#   HOSTS=… NODE=1 bash examples/cluster/ssh.sh start [key=value …]                restart one node, with the same overrides
#   HOSTS=… bash examples/cluster/ssh.sh stop                                      finish the step, save, exit
# The first host is node 0. Output goes to cluster-node<N>.log in the repository of each; the connection may close.
# TRAIN selects another script. It must `exec python3 -m verl.trainer.main_ppo … "$@"`, so that signals reach the trainer.
set -euo pipefail

read -r -a hosts <<< "${HOSTS:?the addresses of the machines, node 0 first}"
train=${TRAIN:-examples/grpo_trainer/run_qwen2-7b.sh}
token=$HOME/.ray/auth_token # of this machine, sent to all nodes; created with mode 0600 if missing
action=${1:?start or stop}
shift

start() { # arguments: node rank, overrides
    local node=$1 remote
    shift
    remote=$(printf '%q ' env RAY_AUTH_MODE=token bash "$train" "$@" \
        trainer.nnodes="${#hosts[@]}" trainer.node_rank="$node" trainer.master_addr="${hosts[0]}")
    # The token is sent through standard input: every account of a machine can read command lines.
    # nohup and no terminal: the run does not depend on this connection.
    # shellcheck disable=SC2029
    ssh "${hosts[$node]}" "IFS= read -r RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN; cd $(printf %q "$PWD") || exit;
        nohup $remote >> cluster-node$node.log 2>&1 < /dev/null & echo \$!" \
        < <(cat "$token" && echo) > "cluster-node$node.pid"
    echo "node $node on ${hosts[$node]}: process $(cat "cluster-node$node.pid")"
}

case $action in
    start)
        if [ ! -s "$token" ]; then
            mkdir -p "$(dirname "$token")"
            (umask 077 && od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' > "$token")
        fi
        for node in ${NODE:-${!hosts[@]}}; do start "$node" "$@"; done
        ;;
    stop) # node 0 saves, exits and notifies the other nodes
        ssh "${hosts[0]}" "kill -TERM $(cat cluster-node0.pid)"
        ;;
    *)
        echo "start or stop, not $action" >&2
        exit 2
        ;;
esac
