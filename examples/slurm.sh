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

# What each task ends with, and how often a host was lost: beside the output, which all hosts see.
notes=$PWD/slurm-$SLURM_JOB_ID.notes
mkdir -p "$notes"
rm -f "$notes"/task-*

# When one task ends, the others end by themselves, after saving or once they miss it. SLURM ends
# what is left after 5 minutes; not at once, when the first that has saved returns 75. SIGTERM goes
# to the shell around Python alone, which passes it on.
srun --label --kill-on-bad-exit=0 --wait=300 bash -c '
  trap "kill -TERM \$!" TERM
  python "${@:2}" &
  while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends a wait early
  wait $!
  status=$?
  echo $status >"$1/task-$SLURM_PROCID"
  exit $status
' bash "$notes" "$@"
status=$? # the highest of all tasks

# One that failed by itself is the cause, also where the others, which lost it, end with more.
for code in $(cat "$notes"/task-* 2>/dev/null); do
  case $code in
  0 | 75 | 76 | 134 | 137) ;;
  *)
    status=$code
    break
    ;;
  esac
done

case $status in
75) # saved at SIGTERM
  scontrol requeue "$SLURM_JOB_ID"
  ;;
76 | 134 | 137) # a host was lost (134: JAX itself saw it; 137: killed): go on, but not for ever
  echo lost >>"$notes/lost"
  if (($(wc -l <"$notes/lost") <= 20)); then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  ;;
*)
  rm -rf "$notes"
  ;;
esac
exit "$status"
