"""Where processes learn who they are, and what they tell each other of their code."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src.clusters import K8sCluster

import jaxzero
from jaxzero import distributed
from jaxzero.distributed import _initialize

SLURM = {
    "SLURM_JOB_ID": "5000",  # port 61440 + 5000 modulo 4096
    "SLURM_STEP_NODELIST": "node[001-002],other",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}
OPEN_MPI = OPEN_MPI_5 | {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
LAUNCHED = {
    "JAXZERO_COORDINATOR": "a:1",
    "JAXZERO_NUM_PROCESSES": "2",
    "JAXZERO_PROCESS_ID": "1",
    "JAXZERO_NODE": "1",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-hosts-0-1-abcde",
    "JOB_COMPLETION_INDEX": "1",
}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run, nothing says that there are several processes."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "JAXZERO_", "JAX_COORD")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `initialize` makes of this process: what others hear, and what JAX is told."""
    told: dict[str, Any] = {}

    def meet(address: str, hello: Any, seconds: float) -> list[str]:
        told["hello"], told["met at"] = hello, address
        return []

    def start(address: str, count: int, number: int, devices: Any, **options: Any) -> None:
        assert options["cluster_detection_method"] == "deactivate"
        told["JAX"] = (address, count, number, devices)

    monkeypatch.setattr(_initialize, "has_backend", lambda: False)
    monkeypatch.setattr(_initialize, "meet", meet)
    monkeypatch.setattr(_initialize, "set_hosts", lambda hosts: None)
    monkeypatch.setattr(jax.distributed, "initialize", start)
    return told


@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        (SLURM, {}, ("node001:62344", 16, 11, [3])),
        (OPEN_MPI, {}, ("10.96.0.1:62624", 8, 6, [2])),
        (OPEN_MPI | SLURM, {}, ("10.96.0.1:62624", 8, 6, [2])),
        (LAUNCHED, {}, ("a:1", 2, 1, None)),
        (LAUNCHED | SLURM, {}, ("a:1", 2, 1, None)),
        # Variables of JAX come before what it finds.
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1,7"}, {}, ("node001:62344", 16, 11, [0, 1, 7])),
        (OPEN_MPI | {"JAX_LOCAL_DEVICE_IDS": "5"}, {}, ("10.96.0.1:62624", 8, 6, [5])),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": ""}, {}, ("node001:62344", 16, 11, [3])),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "b:2"}, {}, ("b:2", 16, 11, [3])),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "b:2"}, {}, ("b:2", 8, 6, [2])),
        (SLURM | {"JAX_COORDINATOR_PORT": "9"}, {}, ("node001:9", 16, 11, [3])),
        (
            {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_LOCAL_DEVICE_IDS": "1"},
            {"num_processes": 3, "process_id": 2},
            ("b:2", 3, 2, [1]),
        ),
        # Arguments come before both.
        (
            SLURM | {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_LOCAL_DEVICE_IDS": "1"},
            {"coordinator_address": "c:3", "local_device_ids": [4, 5]},
            ("c:3", 16, 11, [4, 5]),
        ),
        (SLURM, {"num_processes": 12, "process_id": 0}, ("node001:62344", 12, 0, [3])),
        (OPEN_MPI | SLURM, {"cluster_detection_method": "slurm"}, ("node001:62344", 16, 11, [3])),
        (
            SLURM | {"JAX_COORDINATOR_ADDRESS": "b:2"},
            {"num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate"},
            ("b:2", 2, 1, None),
        ),
    ],
)
def test_who_a_process_is(variables, arguments, expected, told, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.initialize(**arguments)
    assert told["JAX"] == expected
    hello = told["hello"]
    assert (told["met at"], hello.num_processes, hello.process_id) == expected[:3]


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Kubernetes whose only pod is the second of a JobSet's job."""
    for name, value in JOBSET.items():
        monkeypatch.setenv(name, value)
    owner = SimpleNamespace(controller=True, kind="Job")
    pod = SimpleNamespace(
        metadata=SimpleNamespace(labels={"job-name": "train-hosts-0"}, owner_references=[owner]),
    )
    labels = {"jobset.sigs.k8s.io/jobset-name": "train"}
    job = SimpleNamespace(
        metadata=SimpleNamespace(name="train-hosts-0", labels=labels),
        spec=SimpleNamespace(parallelism=4),
    )
    pods = SimpleNamespace(
        list_namespaced_pod=lambda **_: SimpleNamespace(items=[pod]),
    )
    client = SimpleNamespace(
        CoreV1Api=lambda: pods,
        BatchV1Api=lambda: SimpleNamespace(read_namespaced_job=lambda **_: job),
        exceptions=SimpleNamespace(ApiException=OSError),
    )
    config = SimpleNamespace(load_incluster_config=lambda: None)
    package: Any = SimpleNamespace(client=client, config=config)
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    monkeypatch.setattr(K8sCluster, "_namespace", classmethod(lambda cls: "default"))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.2")
    remembered: Any = (K8sCluster._pod, K8sCluster._job)
    for question in remembered:
        question.__func__.cache_clear()
    yield
    for question in remembered:
        question.__func__.cache_clear()


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("train-hosts-0-0.train:55527", 4, 1, None)),
        ({"JAX_COORDINATOR_PORT": "9"}, ("train-hosts-0-0.train:9", 4, 1, None)),
        ({"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_LOCAL_DEVICE_IDS": "0,1"}, ("b:2", 4, 1, [0, 1])),
        (LAUNCHED, ("a:1", 2, 1, None)),
    ],
)
def test_who_a_pod_of_a_jobset_is(variables, expected, told, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.initialize()
    assert told["JAX"] == expected


def test_mpi4py_if_asked_for(told, monkeypatch, tmp_path: Path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "class World:\n"
        "    Get_rank, Get_size = (lambda self: 2), (lambda self: 4)\n"
        "    bcast = lambda self, value, root: 'a:1'\n"
        "    Split_type = lambda self, kind: self\n"
        "COMM_WORLD, COMM_TYPE_SHARED = World(), 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert not distributed.initialize() and not told
        assert distributed.initialize(cluster_detection_method="mpi4py")
    finally:
        for name in ("mpi4py", "mpi4py.MPI"):
            sys.modules.pop(name, None)
    assert told["JAX"] == ("a:1", 4, 2, [2])


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({}, {"cluster_detection_method": "mpi4py"}, "of this cluster .*mpi4py"),
        ({}, {"cluster_detection_method": "slurm"}, "of this cluster .*SLURM_JOB_ID"),
        ({}, {"cluster_detection_method": "lsf"}, "`cluster_detection_method` 'lsf' finds nothing"),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "all"}, {}, "`JAX_LOCAL_DEVICE_IDS` must be .*got 'all'"),
        ({"JAX_COORDINATOR_ADDRESS": "b:2"}, {}, "`num_processes` is not given"),
        (OPEN_MPI_5, {}, "OMPI_COMM_WORLD_SIZE.*mpi4py|Open MPI 5 or newer requires mpi4py"),
    ],
)
def test_mistakes_in_what_says_it(variables, arguments, message: str, told, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**arguments)
    assert not told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "`coordinator_address` is not given and was not detected"),
        ({"coordinator_address": "a:1", "process_id": 0}, "`num_processes` is not given"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "`process_id` must be from 0 to 1, .* got 2",
        ),
        ({"start_seconds": 0}, "must be positive; got 0 and 100"),
    ],
)
def test_mistakes_in_arguments(options, message: str):
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NODE": None}, "`JAXZERO_NODE` must be a number, .* got None. Set all of"),
        ({"NUM_PROCESSES": "two"}, "`JAXZERO_NUM_PROCESSES` must be a number, .* got 'two'"),
        ({"PROCESS_ID": "2"}, "`process_id` must be from 0 to 1, .* got 2"),
        ({"COORDINATOR": "host"}, "`coordinator_address` must be host:port .* got 'host'"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch, changes, message: str):
    changed = {f"JAXZERO_{name}": value for name, value in changes.items()}
    for name, value in (LAUNCHED | changed).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        distributed.initialize()


def test_processes_that_nobody_joins_do_not_train_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ValueError, match="`PMI_SIZE` says that there are 4 processes"):
        distributed.initialize()


def test_it_is_too_late_once_jax_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match="JAX has started already: .* Call it first"):
        distributed.initialize(coordinator_address="a:1", num_processes=2, process_id=0)


def test_processes_are_told_what_must_be_the_same(told, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    distributed.initialize(coordinator_address="a:1", num_processes=2, process_id=0)
    facts = told["hello"].facts
    assert facts == _initialize._facts()
    assert facts["version of Python"] == platform.python_version()
    assert facts["version of jax"] == jax.__version__
    for package in ("jaxlib", "optax", "orbax-checkpoint"):
        assert facts[f"version of {package}"] == importlib.metadata.version(package)
    assert facts["source code of jaxzero"] == _initialize._digest_of_sources()
    assert facts["script"] == _initialize._script() != "none"


def test_a_package_that_is_not_installed_is_a_fact_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_initialize, "_PACKAGES", ("no-such-package",))
    assert _initialize._facts()["version of no-such-package"] == "none"


def test_the_digest_is_of_all_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert Path(jaxzero.__file__).parent == _initialize._PACKAGE_ROOT
    linked, root = tmp_path / "beside", tmp_path / "package"
    for folder in (linked, root, root / "part"):
        folder.mkdir()
        (folder / "_x.py").write_text("x = 1")
    (root / "linked").symlink_to(linked)
    monkeypatch.setattr(_initialize, "_PACKAGE_ROOT", root)
    digests = [_initialize._digest_of_sources()]

    def changes() -> bool:
        digests.append(_initialize._digest_of_sources())
        return digests[-1] not in digests[:-1]

    for folder in (root, root / "part", linked):
        (folder / "_x.py").write_text("x = 2")
        assert changes()
    (root / "_x.py").rename(root / "_y.py")
    assert changes()
    (root / "_x.pyc").write_text("compiled")
    assert not changes()


def test_the_script_is_what_its_file_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def script(text: str | None, folder: str = "a") -> str:
        path = tmp_path / folder / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        return _initialize._script()

    first = script("x = 1\n")
    assert first.startswith("train.py ")
    assert script("x = 1\n", "b") == first, "it may lie elsewhere"
    assert script("x = 2\n") != first
    assert script("#!/a/bin/python\nx = 1\n") == script("#!/b/bin/python\nx = 1\n") == first
    assert script(None) == "none"
    monkeypatch.delattr(sys.modules["__main__"], "__file__")  # `python -c`
    assert _initialize._script() == "none"
