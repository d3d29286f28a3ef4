"""The texts of recipes: scripts of Slurm and ssh by templates, the file of `ray up`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from llmpq.recipe.command import RecipeCommand
from llmpq.recipe.machines import Machine, RayNode, alike
from llmpq.recipe.options import ShellOptions, SlurmOptions, SshOptions
from llmpq.version import llmpq_version
from quant.common.errors import SpecError
from quant.common.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

WARNED_S = 120
"""Before Slurm's limit a run commits and ends; more than a minute, as stages may be slow to go."""

NODES_S = 600
"""Within which all nodes must have joined: images and environments may be slow to load."""

WAIT = f"""\
import sys, time, ray
address, count, until = sys.argv[1], int(sys.argv[2]), time.monotonic() + {NODES_S}
found = 0
while found < count:
    if time.monotonic() > until:
        sys.exit(f"only {{found}} of {{count}} nodes have joined Ray at {{address}}")
    time.sleep(1)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
        found = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except (ConnectionError, RuntimeError, OSError):
        pass
"""
"""Waits until Ray has all its nodes; no single quote is in it."""


@dataclass(frozen=True)
class Recipe:
    """What is written: a command on machines, under a name."""

    name: str
    cluster_file: str
    machines: tuple[Machine, ...]
    command: RecipeCommand

    @property
    def ray_nodes(self) -> int:
        return sum(len(machine.nodes) for machine in self.machines)

    @property
    def heading(self) -> tuple[str, ...]:
        """Comments on where a text is from and which devices it has."""
        of = f"{self.cluster_file} for {self.command.plan_file}"
        lines = (f"Made by llmpq {llmpq_version()} of {of}", *(m.about for m in self.machines))
        # Each on one line: the next would be a command
        return tuple(" ".join(printable(line).split()) for line in lines)


def job_name(given: str | None, cluster: str) -> str:
    """A name that Kubernetes and Slurm take."""
    if given is not None:
        return given
    plain = re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")
    return f"llmpq-{plain}"[:40].strip("-")


def labels(given: Sequence[tuple[str, str]] | None, machines: Sequence[Machine]) -> dict[str, str]:
    """What users call the GPUs, by type; SpecError for types that no machine has."""
    found = dict(given or ())
    kinds = {node.kind.name for machine in machines for node in machine.nodes}
    for name in found:
        if name not in kinds:
            raise SpecError(f"--gpu_label {name!r:.80}: the plan uses {', '.join(sorted(kinds))}")
    return found


def tls_variables(folder: str | None) -> dict[str, str]:
    """Ray's variables for certificates in `folder`, with which its calls are encrypted."""
    if folder is None:
        return {}
    files = {"SERVER_CERT": "tls.crt", "SERVER_KEY": "tls.key", "CA_CERT": "ca.crt"}
    paths = {f"RAY_TLS_{name}": f"{folder}/{file}" for name, file in files.items()}
    return {"RAY_USE_TLS": "1", **paths}


def transport_words(command: RecipeCommand, tls: str | None) -> tuple[str, ...]:
    """By which stages send through Ray where that encrypts: links of their own are plain TCP."""
    given = tls is None or "--transport" in command.words
    return () if given else ("--transport", "ray")


def slurm_script(recipe: Recipe, options: SlurmOptions) -> str:
    if recipe.command.name != "run":
        raise SpecError("a job of Slurm ends; give llmpq run in place of llmpq serve")
    known = labels(options.gpu_label, recipe.machines)
    groups = list(alike(recipe.machines))
    asked = [_slurm_words(group, options, known) for group in groups]
    return _render("slurm.sh.j2", recipe, options, groups=groups, asked=asked, warned_s=WARNED_S)


def _slurm_words(group: Sequence[Machine], options: SlurmOptions, known: dict[str, str]) -> str:
    """What a part of the job asks of Slurm for like machines."""
    words = [f"--nodes={len(group)} --ntasks-per-node=1 --exclusive --mem=0 --time={options.time}"]
    gpus = [node for node in group[0].nodes if node.gpus]
    if gpus:
        types = (f"gpu:{known.get(node.kind.name, _gres_type(node))}:{node.gpus}" for node in gpus)
        words.append(f"--gres={','.join(types)}")
    if options.partition is not None:
        words.append(f"--partition={options.partition}")
    if options.by_name:
        words.append(f"--nodelist={','.join(machine.name for machine in group)}")
    return " ".join(words)


def _gres_type(node: RayNode) -> str:
    return re.sub(r"[^a-z0-9_.-]", "-", (node.kind.ray_type or node.kind.name).lower())


def ssh_script(recipe: Recipe, options: SshOptions) -> str:
    return _render("ssh.sh.j2", recipe, options)


def ray_up_file(recipe: Recipe, options: SshOptions) -> str:
    """The file of `ray up` for machines that are there."""
    head, *workers = recipe.machines

    def start(machines: Sequence[Machine], of_head: bool) -> list[str]:
        text = _render("ray_up.sh.j2", recipe, options, machines=machines, of_head=of_head)
        return ["ray stop" if options.bin is None else f"{options.bin}/ray stop", text]

    values: dict[str, Any] = {
        "cluster_name": recipe.name,
        "provider": {
            "type": "local",
            "head_ip": head.name,
            "worker_ips": [worker.name for worker in workers],
        },
        "auth": {"ssh_user": options.user},
        "min_workers": len(workers),
        "max_workers": len(workers),
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
        "head_start_ray_commands": start([head], True),
        "worker_start_ray_commands": start(workers or [head], False),
    }
    return yaml_text(recipe, values)


def yaml_text(recipe: Recipe, *documents: dict[str, Any]) -> str:
    """The documents of a recipe's file, below its heading."""
    comments = "".join(f"# {line}\n" for line in recipe.heading)
    return comments + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and everything where it belongs."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _render(template: str, recipe: Recipe, options: ShellOptions, **more: object) -> str:
    values = {"recipe": recipe, "options": options, "wait": WAIT, **more}
    extra = transport_words(recipe.command, options.tls)
    values |= {"variables": tls_variables(options.tls), "extra": extra}
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("llmpq.recipe"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = shlex.quote
    environment.filters["words"] = shlex.join
    return environment
