"""Environment variables of processes that compute a stage or measure for one."""

from __future__ import annotations

from actors.processes.gpus import PCI_ORDER

OPENMP_SPINS = "10000"
"""Some microseconds in which torch's idle threads wait awake: if it were longer, they would take
the core from the threads of the decode attention (62 ms a step of a 170M model on two cores, 49
with this)."""

MALLOC_KEEPS = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {"mmap_threshold": 2**25, "trim_threshold": 2**29, "hugetlb": 1}.items()
)
"""glibc keeps large temporaries for the process, on huge pages: fresh pages for each took a third
of a prefill's time at 8 bit and an eighth at 16 (170M model, 4096 tokens, two cores)."""


def stage_environment(threads: int) -> dict[str, str]:
    """Return the variables that must be set when a process of `threads` threads starts, for Ray's
    `env_vars`.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "NUMBA_NUM_THREADS": count,
        "GOMP_SPINCOUNT": OPENMP_SPINS,
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": MALLOC_KEEPS,
        **PCI_ORDER,
    }
