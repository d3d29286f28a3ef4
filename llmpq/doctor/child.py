"""Imports one library, tries it, and prints what came of it as a line of JSON: run as
`python -m llmpq.doctor.child NAME`, so that a library that crashes takes nobody with it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quant.common.errors import LlmpqError
from quant.common.text import printable

Said = dict[str, Any]

_MOST_CHARACTERS = 300


def main(name: str, *words: str) -> None:
    """Try `name`; libraries print where they like, so that standard output is kept from them."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    out.write(json.dumps(said_of(name, TRIALS[name], *words)) + "\n")
    out.flush()
    os._exit(0)  # libraries that crash as they end have worked before


def said_of(name: str, trial: Callable[..., Said], *words: str) -> Said:
    """What the trial says, or its error; nothing for a library that is not installed."""
    package = {"kernels": "torch", "cluster": "ray"}.get(name, name)
    try:
        known = version(package)
    except PackageNotFoundError:
        return {}
    try:
        return {"version": known, **trial(*words)}
    except Exception as error:  # whatever a broken library raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
        if isinstance(error, LlmpqError):  # which says what is wrong, and the remedy
            text = str(error)
        return {"version": known, "error": printable(text, _MOST_CHARACTERS)}


def _torch() -> Said:
    """Multiply on each GPU, beside what this build of torch has code for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        built = torch.version.cuda
        available = torch.cuda.is_available()
        complaints = [] if available else [str(each.message) for each in caught]
    targets: list[str] = torch.cuda.get_arch_list() if available else _built_for(torch)
    for index in range(torch.cuda.device_count() if available else 0):
        try:
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            if float((ones @ ones).sum()) != 64**3:
                complaints.append(f"GPU {index} multiplies wrongly")
        except RuntimeError as error:
            complaints.append(f"GPU {index}: {str(error).splitlines()[0]}")
    if not torch.equal(torch.ones(8, 8) @ torch.ones(8, 8), torch.full((8, 8), 8.0)):
        complaints.append("the CPU multiplies wrongly")
    return {
        "version": torch.__version__,
        "cuda": None if built is None else [int(part) for part in built.split(".")[:2]],
        "targets": targets,
        "available": available,
        "complaints": [printable(each, _MOST_CHARACTERS) for each in complaints],
    }


def _built_for(torch: Any) -> list[str]:
    """The targets of a CUDA build, also where no GPU is seen: `get_arch_list` has none then."""
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return str(flags).split() if flags else []


def _bitsandbytes() -> Said:
    from quant.backends.bnb import check_bitsandbytes

    return {"version": check_bitsandbytes()}


def _kernels() -> Said:
    """The self-test of each kernel that a GPU here would be given, in the type it computes in."""
    import torch

    from quant.backends.kernel_classes import BACKENDS, self_test
    from quant.backends.table import backend_name
    from quant.devices import local_processor
    from quant.scheme import BITWIDTHS

    complaints = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        processor = local_processor(device)
        kind = "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
        for bits in BITWIDTHS:
            name = backend_name(processor, bits, kind)
            backend = BACKENDS.get(name)
            if backend is None:
                continue
            complaint = self_test(backend, getattr(torch, kind), device)
            if complaint is not None:
                complaints.append(f"{name} on GPU {index}: {printable(complaint, 200)}")
    return {"complaints": complaints}


def _numba() -> Said:
    import numba

    add = numba.njit(lambda a, b: a + b)
    if add(1, 2) != 3:
        raise ArithmeticError("a compiled sum is wrong")
    return {}


def _ray() -> Said:
    """Start a local Ray as runs do, and end it."""
    from llmpq.remote.session import ray_session

    logging.disable(logging.CRITICAL)
    begin = time.perf_counter()
    with ray_session("local"):
        seconds = time.perf_counter() - begin
    return {"more": {"seconds": seconds}}


def _cluster(address: str) -> Said:
    from llmpq.remote.session import ray_session

    with ray_session(address):
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        count: dict[str, float] = ray.cluster_resources()
    named = {name: int(amount) for name, amount in count.items() if _is_device(name)}
    devices = ", ".join(f"{amount} {name}" for name, amount in sorted(named.items()))
    return {"more": {"nodes": len(nodes), "devices": devices}}


def _is_device(resource: str) -> bool:
    return ":" not in resource and resource not in ("memory", "object_store_memory")


TRIALS: Mapping[str, Callable[..., Said]] = {
    "torch": _torch,
    "bitsandbytes": _bitsandbytes,
    "kernels": _kernels,
    "numba": _numba,
    "ray": _ray,
    "cluster": _cluster,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
