"""The program that stands for one of Ray's two agents in a local Ray until it is asked for.

The raylet, and `ray.init` with it, waits for both to tell their ports, and each imports for a
second: one makes runtime environments, which forked workers have no need of, one gives metrics to
Prometheus. This one tells ports that are free at once, and becomes the agent at those ports as soon
as somebody comes to them; the agent of metrics after `METRICS_S` in any case, as processes that
send metrics do not look for it for long.

It is run by its path, with the agent's command for its arguments, and imports little.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this folder, whose names are no packages

import select
import socket

METRICS_S = 10.0
_LOOK_S = 1.0  # between two looks whether the raylet lives

_RUNTIME = {"--runtime-env-agent-port": "runtime_env_agent_port"}
_METRICS = {
    "--grpc-port": "metrics_agent_port",
    "--metrics-export-port": "metrics_export_port",
    "--listen-port": "dashboard_agent_listen_port",
}
"""The options with which each agent is told its ports, with the names by which it tells them."""

_CALLS = "--grpc-port"
"""The port that everybody connects to at once, to send metrics to later."""


def main(command: list[str]) -> None:
    """Stand for the agent of `command`, its program and arguments, and become it."""
    options = dict(each.split("=", 1) for each in command if each.startswith("--") and "=" in each)
    known = [names for names in (_RUNTIME, _METRICS) if names.keys() <= options.keys()]
    places = ("--node-id", "--session-dir", "--node-ip-address")
    if len(known) == 1 and all(place in options for place in places):
        node, folder, address = (options[place] for place in places)
        ports, sockets = {}, []
        for option, name in known[0].items():
            ports[option] = options[option]
            if ports[option] == "0":
                waiting = _listening(address)
                ports[option] = str(waiting.getsockname()[1])
                sockets += [waiting] * (option != _CALLS)
            _tell(os.path.join(folder, f"{name}_{node}"), ports[option])
        _wait(sockets, METRICS_S if known[0] is _METRICS else None)
        command = [_with_port(each, ports) for each in command]
    os.execv(sys.executable, [sys.executable, "-u", *command])


def _listening(address: str) -> socket.socket:
    family, kind, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(place)
    found.listen()
    return found


def _tell(path: str, port: str) -> None:
    """Write the file in which the raylet looks for a port, whole at once."""
    with open(f"{path}.new", "w") as file:
        file.write(port)
    os.replace(f"{path}.new", path)


def _wait(sockets: list[socket.socket], at_most_s: float | None) -> None:
    """Wait for somebody to connect; end where the raylet has ended."""
    raylet, waited_s = os.getppid(), 0.0
    while at_most_s is None or waited_s < at_most_s:
        if select.select(sockets, [], [], _LOOK_S)[0]:
            return
        if os.getppid() != raylet:
            sys.exit()
        waited_s += _LOOK_S


def _with_port(argument: str, ports: dict[str, str]) -> str:
    option = argument.partition("=")[0]
    return f"{option}={ports[option]}" if option in ports else argument


if __name__ == "__main__":
    main(sys.argv[1:])
