"""The files of examples/launch: their fields exist, and their commands train on two hosts.

The hosts are network namespaces. No cluster is asked: docs/launch.md says how far each is checked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, installed_environment
from hosts import Host, run_on_both, wire
from processes import run_python

LAUNCH = ROOT / "examples" / "launch"
TRAINS = re.compile(r"parameters equal on 4 ranks: sha256")
QUICK = ["--epochs", "1", "--target", "0"]

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def same_after_reading(module: Any, kind: str, document: dict[str, Any]) -> None:
    """A field that the models do not know, or of another type, would be lost or changed."""
    client = module.ApiClient()
    read = client._ApiClient__deserialize(document, kind)  # the public one takes a web response
    assert client.sanitize_for_serialization(read) == document


def test_fields_of_the_kubernetes_file_exist() -> None:
    kubernetes = pytest.importorskip("kubernetes.client")
    service, job = documents("kubernetes.yaml")
    same_after_reading(kubernetes, "V1Service", service)
    same_after_reading(kubernetes, "V1Job", job)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]


def test_fields_of_the_kubeflow_file_exist() -> None:
    pytest.importorskip("kubernetes.client")
    kubeflow = pytest.importorskip("kubeflow.training")
    (job,) = documents("kubeflow.yaml")
    same_after_reading(kubeflow, "KubeflowOrgV1PyTorchJob", job)


# Their commands


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    names = [("alpha", "192.168.1.10", "fd77::10"), ("beta", "192.168.1.11", "fd77::11")]
    with wire(*(Host(*each) for each in names)) as both:
        yield both
        for host in both:
            host.kill_all()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    env = installed_environment(tmp_path / "installed") | {"OMP_NUM_THREADS": "1"}
    # `torchrun` of this interpreter, wherever that is.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    return env


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return found


def assert_train(hosts: tuple[Host, Host], commands: list[Any], tmp_path: Path) -> None:
    alpha, beta = run_on_both(commands, tmp_path)
    assert (alpha.returncode, beta.returncode) == (0, 0), f"{alpha}\n{beta}"
    assert TRAINS.search(alpha.out), alpha.out


@pytest.mark.namespaces
def test_the_shell_script_trains(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path
) -> None:
    words = ["sh", str(LAUNCH / "torchrun.sh")]
    commands = [
        (host, [*words, str(number), "alpha", "2", *QUICK], env)
        for number, host in enumerate(hosts)
    ]
    assert_train(hosts, commands, tmp_path)


@pytest.mark.namespaces
def test_the_kubernetes_command_trains(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path
) -> None:
    _, job = documents("kubernetes.yaml")
    command = container(job["spec"]["template"])["command"]
    first = "pycomm-digits-0.pycomm-digits"
    assert f"--master-addr={first}" in command
    commands = []
    for number, host in enumerate(hosts):
        # What the cluster fills in: the number, the name of the first pod, the image's folder.
        filled = [
            word.replace("$(JOB_COMPLETION_INDEX)", str(number))
            .replace(first, "alpha")
            .replace("/examples/", f"{ROOT}/examples/")
            for word in command
        ]
        commands.append((host, [*filled, *QUICK], env))
    assert_train(hosts, commands, tmp_path)


@pytest.mark.namespaces
def test_the_kubeflow_command_trains(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path
) -> None:
    (job,) = documents("kubeflow.yaml")
    commands = []
    for number, (kind, host) in enumerate(zip(("Master", "Worker"), hosts, strict=True)):
        pod = container(job["spec"]["pytorchReplicaSpecs"][kind]["template"])
        # The variables that the operator sets where nprocPerNode is given.
        variables = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "alpha",
            "PET_MASTER_PORT": "23456",
        }
        filled = [word.replace("/examples/", f"{ROOT}/examples/") for word in pod["command"]]
        commands.append((host, [*filled, *QUICK], env | variables))
    assert_train(hosts, commands, tmp_path)


def test_the_ray_file_trains() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[train]')")
    done = run_python([str(LAUNCH / "ray_train.py")], timeout_s=250.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"backend pycomm, test accuracy (8|9)\d\.\d%", done.stdout + done.stderr)
