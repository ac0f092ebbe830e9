#!/bin/sh
# Train on several machines with torchrun. Run it on each of them, with the same script:
#
#     sh examples/launch/torchrun.sh 0 alpha 2      # on alpha: number of this machine, first machine, how many
#     sh examples/launch/torchrun.sh 1 alpha 2      # on beta
#
# With ssh to each machine, one command does it: python -m pycomm run -H alpha:2,beta:2 examples/train_digits.py
#
# alpha is a name or an address of the first machine that all others can reach. NPROC is the number of ranks per machine.
set -eu
number=${1:?number of this machine, from 0}
first=${2:?name or address of the first machine}
machines=${3:?number of machines}
shift 3

# pycomm finds the network by itself. To choose it, name the beginning of the interfaces' names:
# export PYCOMM_SOCKET_IFNAME=eth
# Behind a firewall, open the port below on the first machine, and this range on all:
# export PYCOMM_PORT_RANGE=29600-29699
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec torchrun --nnodes="$machines" --node-rank="$number" --nproc-per-node="${NPROC:-2}" \
  --master-addr="$first" --master-port="${MASTER_PORT:-29500}" \
  "$(dirname "$0")/../train_digits.py" "$@"
