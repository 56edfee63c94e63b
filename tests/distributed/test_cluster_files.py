"""`examples/slurm.sh` and `examples/jobset.yaml`: what of them can be checked without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxzero.distributed import DIVERGED, PEER_LOST, STOPPED
from jaxzero.launch import Launch, launch

MISTAKE = 2  # in the arguments, as of `argparse`
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Options of sbatch that a file of ours may use, and the form of their values.
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"([a-z]\w*:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d{1,2}:\d\d:\d\d",
    "signal": r"([BR]+:)?[A-Z]+[12]?(@\d{1,5})?",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"\S+",
}


class TestSlurm:
    SCRIPT = EXAMPLES / "slurm.sh"

    def test_bash_can_read_it(self):
        done = subprocess.run(
            ["bash", "-n", self.SCRIPT], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_options_are_known_and_come_before_commands(self):
        lines = self.SCRIPT.read_text().splitlines()
        options, commands = {}, False
        for line in lines:
            if line.startswith("#SBATCH"):
                assert not commands, f"sbatch stops reading options before {line!r}"
                found = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
                assert found, line
                name, value = found.groups()
                assert name not in options, f"{name} is given twice"
                assert name in SBATCH, f"{name}: is this an option of sbatch?"
                form = SBATCH[name]
                assert (value is None) if form is None else re.fullmatch(form, value or ""), line
                options[name] = value
            elif line.strip() and not line.startswith("#"):
                commands = True
        assert lines[0].startswith("#!")
        assert options["nodes"] == "2"
        # One task for each GPU, as JAX assigns them; SIGTERM to the tasks, not to the shell (B:).
        assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
        assert re.fullmatch(r"TERM@\d+", options["signal"])
        assert "requeue" in options and options["open-mode"] == "append"

    SRUN = """#!/bin/bash
        while [[ $1 == --* ]]; do shift; done
        highest=0 SLURM_PROCID=0
        for CODE in $CODES; do
            export CODE SLURM_PROCID
            if [[ $CODE == gone ]]; then
                status=137 # with the shell around it
            else
                "$@"
                status=$?
            fi
            ((highest = status > highest ? status : highest, SLURM_PROCID += 1))
        done
        exit $highest
    """
    PYTHON = """#!/bin/bash
        echo python "$@"
        trap 'kill $!; exit "$CODE"' TERM
        sleep 20 >/dev/null 2>&1 &
        kill -TERM $PPID # as SLURM does: to the task, and not to what it starts
        wait
    """

    @pytest.mark.parametrize(
        ("codes", "lost", "status", "requeued"),
        [
            # What several tasks end with, and how often a host was lost before.
            ("0 0", 0, 0, False),
            ("1 1", 0, 1, False),
            (f"{STOPPED} {STOPPED}", 0, STOPPED, True),
            (f"0 {STOPPED}", 30, STOPPED, True),
            (f"{PEER_LOST} {PEER_LOST}", 0, PEER_LOST, True),
            (f"{PEER_LOST} {STOPPED}", 19, PEER_LOST, True),
            (f"{PEER_LOST} {STOPPED}", 20, PEER_LOST, False),
            (f"{PEER_LOST} 134 gone", 19, 137, True),
            (f"{PEER_LOST} 134 gone", 20, 137, False),
            ("143 gone", 0, 143, False),
            (f"{DIVERGED} {DIVERGED}", 0, DIVERGED, False),
            # One failed by itself, and the others lost it.
            (f"1 {PEER_LOST} 134", 0, 1, False),
            (f"{PEER_LOST} {MISTAKE} gone", 0, MISTAKE, False),
            (f"134 {DIVERGED} {PEER_LOST}", 0, DIVERGED, False),
            (f"{PEER_LOST} 139", 0, 139, False),
        ],
    )
    def test_what_goes_back_into_the_queue(self, codes, lost, status, requeued, tmp_path):
        programs = {"srun": self.SRUN, "python": self.PYTHON, "scontrol": '#!/bin/sh\necho "$@"\n'}
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        notes = tmp_path / "slurm-17.notes"
        notes.mkdir()
        (notes / "lost").write_text("lost\n" * lost)
        (notes / "task-7").write_text("1\n")  # of the attempt before
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_RESTART_COUNT": "100",  # it also counts those after 75
            "CODES": codes,
        }
        done = subprocess.run(
            ["bash", self.SCRIPT, "train.py", "--name", "a b"],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (status, "")
        tasks = [code for code in codes.split() if code != "gone"]
        lines = ["python train.py --name a b"] * len(tasks) + ["requeue 17"] * requeued
        assert done.stdout.splitlines() == lines
        assert notes.exists() or not requeued
        if requeued:
            was_lost = status != STOPPED
            assert (notes / "lost").read_text().count("lost") == lost + was_lost

    def test_where_nothing_can_be_counted_a_lost_host_ends_the_job(self, tmp_path):
        for name, text in {"srun": "exit 76", "scontrol": 'echo "$@"'}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        (tmp_path / "slurm-17.notes").write_text("")  # no folder
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        done = subprocess.run(
            ["bash", self.SCRIPT, "train.py"], env=variables, cwd=tmp_path, capture_output=True
        )
        assert (done.returncode, done.stdout) == (76, b"")


@pytest.fixture
def jobset() -> dict[str, Any]:
    (document,) = yaml.safe_load_all((EXAMPLES / "jobset.yaml").read_text())
    return document


@pytest.fixture
def job(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated.keys() == {"name", "replicas", "template"}
    assert replicated["replicas"] == 1  # the pods of one job are the processes
    assert replicated["template"].keys() == {"spec"}
    return replicated["template"]["spec"]


@pytest.fixture
def pod(job: dict[str, Any]) -> dict[str, Any]:
    assert job["template"].keys() == {"spec"}
    return job["template"]["spec"]


class TestJobSet:
    def test_the_set(self, jobset):
        assert jobset.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert jobset["kind"] == "JobSet"
        spec = jobset["spec"]
        assert spec.keys() == {"network", "failurePolicy", "replicatedJobs"}
        assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}

    def test_names_are_dns_labels(self, jobset, job, pod):
        names = [jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]]
        names += [each["name"] for each in pod["containers"] + pod["volumes"]]
        for name in names:
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        longest = f"{names[0]}-{names[1]}-0-{job['completions']}-abcde"
        assert len(longest) <= 63

    def test_all_restart_together_unless_it_is_no_use(self, jobset, job):
        policy = jobset["spec"]["failurePolicy"]
        assert policy.keys() == {"maxRestarts", "rules"}
        assert policy["maxRestarts"] > 0
        (rule,) = policy["rules"]
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule.pop("name"))
        assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        assert job["backoffLimit"] == 0

    def test_the_job(self, job):
        assert job.keys() == {
            "completionMode",
            "completions",
            "parallelism",
            "backoffLimit",
            "podFailurePolicy",
            "template",
        }
        assert job["completionMode"] == "Indexed"
        assert job["completions"] == job["parallelism"] == 2

    def test_exit_codes_of_pods(self, job, pod):
        assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy requires
        assert job["podFailurePolicy"].keys() == {"rules"}
        found = {}
        for rule in job["podFailurePolicy"]["rules"]:
            assert rule.keys() == {"action", "onExitCodes"}
            codes = rule["onExitCodes"]
            assert codes.keys() == {"containerName", "operator", "values"}
            assert codes["containerName"] in [each["name"] for each in pod["containers"]]
            assert codes["operator"] == "In"
            assert codes["values"] == sorted(set(codes["values"])) and 0 not in codes["values"]
            found[rule["action"]] = codes["values"]
        assert found == {"Ignore": [STOPPED], "FailJob": [MISTAKE, DIVERGED]}

    def test_the_pod(self, pod):
        assert pod.keys() == {
            "restartPolicy",
            "terminationGracePeriodSeconds",
            "containers",
            "volumes",
        }
        assert pod["terminationGracePeriodSeconds"] >= 60
        (container,) = pod["containers"]
        assert container.keys() == {
            "name",
            "image",
            "command",
            "args",
            "env",
            "ports",
            "resources",
            "volumeMounts",
        }
        # A shell would be process 1 in the container, and would keep SIGTERM to itself.
        assert container["command"] == ["python", "train.py"]
        assert all(isinstance(word, str) for word in container["args"])
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}

    def test_what_processes_are_told(self, jobset, job, pod, capfd):
        told = {each["name"]: each for each in pod["containers"][0]["env"]}
        assert launch(Launch(nodes=1, command=("env",))) == 0
        known = set(re.findall(r"^JAXZERO_\w+", capfd.readouterr().out, re.MULTILINE))
        assert told.keys() == known - {"JAXZERO_RESTARTS"}
        for name in ("JAXZERO_PROCESS_ID", "JAXZERO_NODE"):
            path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            assert told[name] == {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        assert told["JAXZERO_NUM_PROCESSES"]["value"] == str(job["completions"])
        name = jobset["metadata"]["name"]
        hosts = jobset["spec"]["replicatedJobs"][0]["name"]
        (port,) = pod["containers"][0]["ports"]
        address = f"{name}-{hosts}-0-0.{name}:{port['containerPort']}"
        assert told["JAXZERO_COORDINATOR"]["value"] == address
