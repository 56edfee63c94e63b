"""`examples/slurm.sh` and `examples/jobset.yaml`: what of them can be checked without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxzero._exit_codes import DIVERGED, MISTAKE, PEER_LOST, STOPPED
from jaxzero.launch._child_environment import environment, slots

EXAMPLES = Path(__file__).parent.parent / "examples"

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

    @pytest.mark.parametrize(
        ("code", "restarts", "requeued"),
        [
            (0, None, False),
            (1, None, False),
            (STOPPED, None, True),
            (STOPPED, "100", True),
            (PEER_LOST, None, True),
            (PEER_LOST, "20", False),
            (DIVERGED, None, False),
            (134, None, True),
            (137, None, True),
            (137, "20", False),
            (139, None, False),
        ],
    )
    def test_what_goes_back_into_the_queue(self, code, restarts, requeued, tmp_path):
        for name, end in (("srun", code), ("scontrol", 0)):
            fake = tmp_path / name
            fake.write_text(f'#!/bin/sh\necho {name} "$@"\nexit {end}\n')
            fake.chmod(0o755)
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        if restarts is not None:
            variables["SLURM_RESTART_COUNT"] = restarts
        done = subprocess.run(
            ["bash", self.SCRIPT, "train.py", "--name", "a b"],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, "")
        started, *then = done.stdout.splitlines()
        assert started.startswith("srun --") and started.endswith(" python train.py --name a b")
        assert then == (["scontrol requeue 17"] if requeued else [])


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

    def test_what_processes_are_told(self, jobset, job, pod):
        told = {each["name"]: each for each in pod["containers"][0]["env"]}
        (slot,) = slots([0], 1, None)
        ours = environment(slot, processes=1, port=1, restarts=0, cpu_devices=None)
        known = {name for name in ours if name.startswith("JAXZERO_")}
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
