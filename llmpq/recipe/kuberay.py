"""Manifests for Kubernetes with KubeRay: a `RayJob` for `llmpq run`; for `llmpq serve` a
`RayCluster`, and the server as a deployment that joins it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmpq.recipe.machines import Machine, RayNode, alike
from llmpq.recipe.options import KubeRayOptions
from llmpq.recipe.texts import (
    WAIT,
    Recipe,
    labels,
    tls_variables,
    transport_words,
    yaml_text,
)
from planner.plan.file import read
from quant.common.errors import SpecError
from quant.common.url_files import is_url

Manifest = dict[str, Any]

PLACE = "/etc/llmpq"
_PLAN, _SCRIPT = f"{PLACE}/plan.json", f"{PLACE}/command.sh"
MOST_PLAN_BYTES = 900_000
"""Kubernetes takes 1 MiB in a ConfigMap (https://kubernetes.io/docs/concepts/configuration/configmap)."""

RETRIES = 3
STOP_S = 60
HEAD = {"cpu": "2", "memory": "8Gi"}
"""Of the pod of the head, or of the server, where rows are read and tokenized."""

SERVE_PORT = 8000


@dataclass(frozen=True)
class _Writer:
    recipe: Recipe
    options: KubeRayOptions
    known: dict[str, str]

    def config_map(self, script: str) -> Manifest:
        plan = read(self.recipe.command.plan_file)
        if len(plan.encode()) > MOST_PLAN_BYTES:
            raise SpecError(
                f"plan {self.recipe.command.plan_file} has {len(plan.encode())} bytes; a ConfigMap "
                f"of Kubernetes holds {MOST_PLAN_BYTES} of them: plan from a file of fewer rows"
            )
        data = {"plan.json": plan, "command.sh": script}
        return {**_head("v1", "ConfigMap", self.recipe.name), "data": data}

    def cluster(self) -> Manifest:
        groups = [self.worker_group(group) for group in alike(self.recipe.machines)]
        names = [group["groupName"] for group in groups]
        for index, group in enumerate(groups):
            if names.count(group["groupName"]) > 1:
                group["groupName"] += f"-{index}"
        head = self.pod("ray-head", {"requests": HEAD, "limits": {"memory": HEAD["memory"]}})
        return {
            "rayVersion": version("ray"),
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                "template": head,
            },
            "workerGroupSpecs": groups,
        }

    def worker_group(self, group: Sequence[Machine]) -> Manifest:
        machine = group[0]
        if len(machine.nodes) > 1:
            raise SpecError(
                f"machine {machine.about}: pods of Kubernetes cannot tell its devices apart; plan "
                "for one type of each machine"
            )
        (node,) = machine.nodes
        start = {"num-cpus": str(node.cpus), "num-gpus": str(node.gpus)}
        if node.resources:  # KubeRay puts it into a command as it is
            start["resources"] = json.dumps(json.dumps(node.resources))
        pod = self.pod("ray-worker", _resources(machine, node))
        if node.gpus:
            vendor, label = _gpu_words(node)
            pod["spec"]["nodeSelector"] = {label: self.known.get(node.kind.name, product(node))}
            pod["spec"]["tolerations"] = [{"key": f"{vendor}/gpu", "operator": "Exists"}]
        return {
            "groupName": re.sub(r"[^a-z0-9]+", "-", node.kind.name.lower()),
            "replicas": len(group),
            "minReplicas": len(group),
            "maxReplicas": len(group),
            "rayStartParams": start,
            "template": pod,
        }

    def pod(self, container: str, resources: Manifest) -> Manifest:
        volumes: list[Manifest] = [
            {"name": "data", "persistentVolumeClaim": {"claimName": self.options.claim}},
            {"name": "command", "configMap": {"name": self.recipe.name}},
        ]
        mounts: list[Manifest] = [
            {"name": "data", "mountPath": self.options.mount},
            {"name": "command", "mountPath": PLACE, "readOnly": True},
        ]
        if self.options.tls is not None:
            volumes.append({"name": "tls", "secret": {"secretName": f"{self.recipe.name}-tls"}})
            mounts.append({"name": "tls", "mountPath": self.options.tls, "readOnly": True})
        variables = tls_variables(self.options.tls)
        content: Manifest = {"name": container, "image": self.options.image}
        if variables:
            content["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        content |= {"resources": resources, "volumeMounts": mounts}
        spec = {"terminationGracePeriodSeconds": 2 * STOP_S, "containers": [content]}
        return {"spec": {**spec, "volumes": volumes}}

    def job(self) -> Manifest:
        return {
            **_head("ray.io/v1", "RayJob", self.recipe.name),
            "spec": {
                "entrypoint": f"bash {_SCRIPT}",
                "runtimeEnvYAML": f'env_vars: {{RAY_JOB_STOP_WAIT_TIME_S: "{STOP_S}"}}\n',
                "backoffLimit": RETRIES,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": self.cluster(),
            },
        }

    def service(self) -> tuple[Manifest, ...]:
        """The cluster of Ray, the server that joins it, and its address."""
        name, port = self.recipe.name, self.recipe.command.port or SERVE_PORT
        labelled = {"app": f"{name}-serve"}
        pod = self.pod("llmpq", {"requests": HEAD, "limits": {"memory": HEAD["memory"]}})
        (content,) = pod["spec"]["containers"]
        token = {"secretKeyRef": {"name": name, "key": "auth_token"}}
        key = {"secretKeyRef": {"name": f"{name}-key", "key": "key"}}
        content["command"] = ["bash", _SCRIPT]
        content["env"] = [
            *content.get("env", ()),
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
            {"name": "LLMPQ_API_KEY", "valueFrom": key},
        ]
        content["ports"] = [{"name": "http", "containerPort": port}]
        content["readinessProbe"] = {"httpGet": {"path": "/ready", "port": "http"}}
        deployment = {
            **_head("apps/v1", "Deployment", f"{name}-serve"),
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},  # two servers would want the same devices
                "selector": {"matchLabels": labelled},
                "template": {"metadata": {"labels": labelled}, **pod},
            },
        }
        cluster = {**_head("ray.io/v1", "RayCluster", name), "spec": self.cluster()}
        ports = [{"name": "http", "port": port, "targetPort": "http"}]
        address = {
            **_head("v1", "Service", f"{name}-serve"),
            "spec": {"selector": labelled, "ports": ports},
        }
        return cluster, deployment, address


def kuberay_manifests(recipe: Recipe, options: KubeRayOptions) -> tuple[Manifest, ...]:
    writer = _Writer(recipe, options, labels(options.gpu_label, recipe.machines))
    if recipe.command.name == "run":
        return writer.config_map(_run_script(recipe, options)), writer.job()
    return writer.config_map(_serve_script(recipe, options)), *writer.service()


def kuberay_file(recipe: Recipe, options: KubeRayOptions) -> str:
    return yaml_text(recipe, *kuberay_manifests(recipe, options))


def product(node: RayNode) -> str:
    """What GPU feature discovery calls a GPU: the driver's name with dashes."""
    names = (*node.kind.reported_as, *node.kind.aliases)
    makers = ("NVIDIA", "Tesla", "Quadro")
    name = next((each for each in names if each.startswith(makers)), f"NVIDIA-{node.kind.name}")
    return re.sub(r"[ _]", "-", name)


def _head(api: str, kind: str, name: str) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}}


def _gpu_words(node: RayNode) -> tuple[str, str]:
    """The vendor in names of resources, and the label that tells the product."""
    if node.kind.rocm_architecture is not None:
        return "amd.com", "amd.com/gpu.product-name"
    return "nvidia.com", "nvidia.com/gpu.product"


def _resources(machine: Machine, node: RayNode) -> Manifest:
    requests: Manifest = {}
    cpus = node.cpus or machine.threads
    if cpus:
        requests["cpu"] = str(cpus)
    if machine.memory_bytes is not None:
        requests["memory"] = f"{machine.memory_bytes >> 20}Mi"
    limits: Manifest = {f"{_gpu_words(node)[0]}/gpu": node.gpus} if node.gpus else {}
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _run_script(recipe: Recipe, options: KubeRayOptions) -> str:
    _refuse_lost(recipe, options)
    more = ("--address", "auto", *transport_words(recipe.command, options.tls))
    return (
        f"{recipe.command.text(_PLAN, more)}\n"
        "code=$?\n"
        "[ $code -ne 3 ] || exit 0  # all rows are done, some with errors: no reason to try again\n"
        "exit $code\n"
    )


def _serve_script(recipe: Recipe, options: KubeRayOptions) -> str:
    command = recipe.command
    more = ["--address", "auto", "--host", "0.0.0.0", *transport_words(recipe.command, options.tls)]
    if not command.has_batch_dir:
        more += ["--batch_dir", f"{options.mount}/{recipe.name}.batches"]
    head = f"{recipe.name}-head-svc:6379"
    return (
        "set -e\n"
        f"until ray health-check --address {head}; do sleep 2; done\n"
        f"ray start --address={head} --num-cpus=0 --num-gpus=0 --disable-usage-stats\n"
        f"python -c '{WAIT}' auto {recipe.ray_nodes + 2}  # with the head and this pod\n"
        f"exec {command.text(_PLAN, more)}\n"
    )


def _refuse_lost(recipe: Recipe, options: KubeRayOptions) -> None:
    """SpecError for results that would end with their pod."""
    path = recipe.command.output
    if path is not None and not is_url(path) and not Path(path).is_relative_to(options.mount):
        raise SpecError(
            f"--output {path} would end with its pod; give a path in {options.mount}, where "
            f"the claim {options.claim} is mounted (--mount), or a URL"
        )
