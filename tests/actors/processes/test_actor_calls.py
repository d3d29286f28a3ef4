"""What drivers call is what the actors have, and is known without torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

from actors.processes import actor_calls
from actors.processes.ranks import RankActor
from actors.processes.stage_actor import StageActor

NAMED = {"__ray_concurrency_group__", "__ray_num_returns__"}
IN_PROCESS = {"board", "close_handover", "close_rendezvous", "open_handover"}
COMPUTING = {"compute", "finish", "sent"}  # what the driver of a pipeline asks in the process


def calls(made: type[Any]) -> dict[str, dict[str, Any]]:
    """The methods of an actor, with what Ray is told of each."""
    found = inspect.getmembers(made, inspect.isfunction)
    return {
        name: {key: vars(each).get(key) for key in NAMED}
        | {"many": inspect.isgeneratorfunction(each)}
        for name, each in found
        if not name.startswith("_")
    }


@pytest.mark.parametrize("real", [RankActor, StageActor])
def test_a_stand_in_has_the_calls_of_its_actor(real: type[Any]) -> None:
    own, wanted = calls(getattr(actor_calls, real.__name__)), calls(real)
    for name in IN_PROCESS | COMPUTING:
        wanted.pop(name, None)
    if real is StageActor:
        own.pop("join")  # of ranks alone
    assert own == wanted


def test_a_driver_knows_its_stages_without_torch() -> None:
    heavy = ("torch", "transformers", "numba", "safetensors.torch")
    code = "import sys, llmpq.cli.run, actors.handover.group, llmpq.run.monitor\n"
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
