"""The files in examples/deploy: what they run exists, with the options that they give, and their parts fit together."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from outboard.cli.app import app
from outboard.cli.network import head_address
from outboard.config import NetworkConfig
from outboard.serve import admin

DEPLOY = Path(__file__).parents[1] / "examples" / "deploy"
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def parsed(command: list[str]) -> dict[str, Any]:
    """The options of `outboard NAME ...` as the command line has them; raises what it refuses. Nothing is run."""
    assert Path(command[0]).name == "outboard"
    name, *arguments = (re.sub(r"\$\(\w+\)", "127.0.0.1", word) for word in command[1:])
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options: dict[str, Any] = commands[name].make_context(name, arguments).params
    return options


def found(kind: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in MANIFEST if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = found("StatefulSet", name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The container of a pod, and the options of its command."""
    (one,) = pod(name)["containers"]
    return one, parsed([*one["command"], *one["args"]])


def test_the_unit_file_and_the_image() -> None:
    unit = (DEPLOY / "outboard.service").read_text().replace("\\\n", " ")
    (start,) = re.findall("^ExecStart=(.*)", unit, re.MULTILINE)
    assert parsed(shlex.split(start))["restart"] == "on-failure"
    image = (DEPLOY / "Containerfile").read_text()
    command = [json.loads(re.findall(f"^{word} (.*)", image, re.MULTILINE)[-1]) for word in ("ENTRYPOINT", "CMD")]
    assert parsed([*command[0], *command[1]])["port"] == 8000


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parsed(["outboard", "node", "--no-such-option=1"])


def test_the_head_is_probed_where_it_answers() -> None:
    one, options = container("outboard-head")
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert ports == {"api": options["port"], "admin": options["admin_port"], "join": options["join_port"]}
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert one[probe]["httpGet"] == {"path": path, "port": "admin"}
        assert f'Route("{path}"' in inspect.getsource(admin)
    started = one["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] > options["startup_timeout"]
    assert pod("outboard-head")["terminationGracePeriodSeconds"] > 2 * options["shutdown_timeout"]
    assert pod("outboard-node")["terminationGracePeriodSeconds"] > options["shutdown_timeout"]


def test_nodes_find_the_head_before_it_is_ready() -> None:
    _, head = container("outboard-head")
    _, node = container("outboard-node")
    service = found("Service", "outboard-head")["spec"]
    assert head_address(node["join"]) == f"tcp://outboard-head-0.outboard-head:{head['join_port']}"
    assert found("StatefulSet", "outboard-head")["spec"]["serviceName"] == "outboard-head"
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert [port["port"] for port in service["ports"]] == [head["join_port"]]
    places = found("StatefulSet", "outboard-node")["spec"]["replicas"] * node["ranks"]
    assert places == head["data_parallel_size"] - head["local_ranks"] + 1  # a spare
    assert node["engine"] == head["engine"]


@pytest.mark.parametrize("name", ["outboard-head", "outboard-node"])
def test_labels_and_tokens(name: str) -> None:
    spec = found("StatefulSet", name)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == {"app": "outboard", "part": name.removeprefix("outboard-")}
    assert found("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == labels
    one, options = container(name)
    (copies,) = pod(name)["initContainers"]
    program, *mode, _, token = copies["command"]
    assert (program, mode, Path(token)) == ("install", ["-m", "600"], options["token_file"])
    volumes = {
        volume["name"] for volume in [*pod(name)["volumes"], *(v["metadata"] for v in spec["volumeClaimTemplates"])]
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in [*one["volumeMounts"], *copies["volumeMounts"]]}
    assert set(mounts.values()) == volumes
    assert mounts[str(Path(token).parent)] == "token"


def test_only_nodes_get_to_the_ports_for_nodes() -> None:
    _, head = container("outboard-head")
    api, nodes = found("NetworkPolicy", "outboard-head")["spec"]["ingress"]
    assert [port["port"] for port in api["ports"]] == [head["port"]]
    (allowed,) = nodes["from"]
    assert (
        allowed["podSelector"]["matchLabels"]
        == found("StatefulSet", "outboard-node")["spec"]["selector"]["matchLabels"]
    )
    join, others = nodes["ports"]
    network = NetworkConfig(listen=head["listen"], ports=head["ports"])
    assert join == {"port": head["join_port"]}
    assert network.port_range == range(others["port"], others["endPort"] + 1)
    for name in ("outboard-head", "outboard"):
        assert found("Service", name)["spec"]["selector"] == {"app": "outboard", "part": "head"}


def free_job() -> str:
    """The number of a job whose join port is free."""
    for job in range(os.getpid(), os.getpid() + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20000 + job % 10000))
            except OSError:
                continue
            return str(job)
    raise RuntimeError("no port is free")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which the script takes this host for all machines of a job; `srun` runs what it is given."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    path = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    facts = {"SLURM_NNODES": "2", "SLURM_JOB_ID": free_job(), "SLURMD_NODENAME": "127.0.0.1"}
    yield {**os.environ, **facts, "HOME": str(tmp_path), "PATH": os.pathsep.join(path)}


def start(slurm: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = ["bash", str(DEPLOY / "outboard.sbatch"), *arguments, "--host", "127.0.0.1", "--port", "0"]
    return subprocess.Popen(command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_job_serves_until_it_is_told_to_end(slurm: dict[str, str], nothing_left: None) -> None:
    tokens = Path(slurm["HOME"], ".outboard")
    with start(slurm, "mock") as job:
        bound = threading.Timer(60, job.kill)
        bound.start()
        try:
            assert job.stdout is not None
            said = []
            for line in job.stdout:
                said.append(line)
                if "serving mock with 2 engine core(s)" in line:
                    break
            else:
                pytest.fail("".join(said))
            (token,) = tokens.iterdir()
            assert token.stat().st_mode & 0o777 == 0o600
            job.send_signal(signal.SIGTERM)
            rest = job.stdout.read()
            assert job.wait(30) == 0, rest
        finally:
            bound.cancel()
    assert not list(tokens.iterdir())


def test_a_job_whose_head_does_not_start(slurm: dict[str, str], nothing_left: None) -> None:
    with start(slurm, "no-such-engine") as job:
        said, _ = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "no-such-engine" in said
    assert not list(Path(slurm["HOME"], ".outboard").iterdir())
