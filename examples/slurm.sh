#!/usr/bin/env bash
# Training on 2 hosts with 8 GPUs each under SLURM, one process for each GPU:
#
#     sbatch examples/slurm.sh train.py ARGUMENTS
#
# train.py calls jaxzero.distributed.initialize() first, and goes on from its last checkpoint by
# itself. Two minutes before the time limit, and when the job is preempted, every process gets
# SIGTERM, saves and ends with exit code 75; the job is then put back into the queue.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
# All tasks of a host must see all of its GPUs: JAX gives task i GPU i. So not --gpus-per-task.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u # and not -e: what srun returns decides what follows

# When one task ends, the others end by themselves, after saving or once they miss it. SLURM ends
# what is left after 5 minutes; not at once, when the first that has saved returns 75.
srun --label --kill-on-bad-exit=0 --wait=300 python "$@"
status=$? # the highest of all tasks

case $status in
75) # saved at SIGTERM
  scontrol requeue "$SLURM_JOB_ID"
  ;;
76 | 134 | 137) # a host was lost (134: JAX itself saw it; 137: killed): go on, but not for ever
  if ((${SLURM_RESTART_COUNT:-0} < 20)); then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  ;;
esac
exit "$status"
