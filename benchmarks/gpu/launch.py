"""Finds a Python that can measure on this machine, makes one if there is none, and starts it there.

    python -m benchmarks.gpu.launch [--venv .venv] [arguments of benchmarks.gpu]

Taken in this order: GPU_PYTHON, as it is; the environment in `--venv`; python3 and python of the
PATH: the first whose torch sees a GPU (with `--dry_run`: that has torch). Where none does and
NVIDIA's driver is there, `make install` makes `--venv`. What that Python lacks of the libraries is
installed into an environment over it (`.venv-gpu`), if a package registry can be reached; without,
the parts that need it say so.
Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import TIME_LIMIT_S

_ROOT = Path(__file__).resolve().parents[2]
_OVERLAY = _ROOT / ".venv-gpu"
_PROBE_LIMIT_S, _INSTALL_LIMIT_S = 120, 600
_PROBE = "import torch; print(torch.cuda.is_available())"
_INSTALLED = (
    "import importlib.metadata as m, site, sys; "
    "print(*{(d.name or '').lower().replace('_', '-') for d in m.distributions()}); "
    "print(*[p for p in sys.path if p.endswith('-packages')], sep=chr(10))"
)
_EXTRAS = ("bitsandbytes", "cpu")
_FOR_TESTS = "pytest>=8.3"


def main(arguments: Sequence[str] | None = None) -> int:
    """Start `benchmarks.gpu` with the Python that was found; its exit code, or 2 without one."""
    began = time.monotonic()
    rest = list(sys.argv[1:] if arguments is None else arguments)
    venv = ".venv"
    if "--venv" in rest:
        at = rest.index("--venv")
        venv = rest[at + 1]
        del rest[at : at + 2]
    dry_run = "--dry_run" in rest
    named = os.environ.get("GPU_PYTHON")
    python = named or find(candidates(venv), dry_run)
    if python is None and not dry_run and not _has_driver():
        print("no NVIDIA driver is here; --dry_run goes the same way on the CPU", file=sys.stderr)
        return 2
    python = python or _made(venv)
    if python is None:
        print("no Python here has torch, and none could be installed", file=sys.stderr)
        return 2
    python = named or _completed(python)
    if not any(each.startswith("--time_limit_s") for each in rest):
        left = TIME_LIMIT_S - (time.monotonic() - began)
        rest += ["--time_limit_s", f"{left:.0f}"]
    print(f"with {python}", flush=True)
    return subprocess.run([python, "-m", "benchmarks.gpu", *rest], check=False).returncode


def candidates(venv: str) -> list[str]:
    """Interpreters to try, the first choice first."""
    own = str(Path(venv).absolute() / "bin" / "python")
    on_path = [shutil.which(name) for name in ("python3", "python", "python3.12", "python3.11")]
    return list(dict.fromkeys(each for each in (own, *on_path, sys.executable) if each))


def find(paths: Sequence[str], dry_run: bool) -> str | None:
    """The first that sees a GPU, in a dry run that has torch at all."""
    wanted = (True, False) if dry_run else (True,)
    return next((path for path in paths if _probe(path) in wanted), None)


def missing(requirements: Sequence[str], installed: set[str]) -> list[str]:
    """Requirements whose package is not among `installed` (lower case, with dashes)."""
    return [each for each in requirements if _package(each) not in installed]


def requirements() -> list[str]:
    """The libraries that all parts together need, by `pyproject.toml`."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for name in _EXTRAS for each in project["optional-dependencies"][name]]
    asked = [*project["dependencies"], *extras, _FOR_TESTS]
    return [each for each in asked if not each.startswith("torch")]  # which that Python has


def _probe(path: str) -> bool | None:
    """Whether torch sees a GPU; None where there is no torch, or no Python that is new enough."""
    lines = _lines(path, f"import sys; assert sys.version_info >= (3, 11); {_PROBE}")
    return lines[-1] == "True" if lines else None


def _has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def _made(venv: str) -> str | None:
    """The environment that `make install` makes; whether it sees a GPU `benchmarks.gpu` says."""
    print("no Python has a torch that serves; making an environment …", flush=True)
    command = ["make", "install", f"VENV={venv}"]
    if subprocess.run(command, cwd=_ROOT, check=False).returncode:
        return None
    path = str(Path(venv).absolute() / "bin" / "python")
    return None if _probe(path) is None else path


def _completed(path: str) -> str:
    """`path`, or an environment over it that has what it lacks, as far as that can be had."""
    lines = _lines(path, _INSTALLED)
    lacking = missing(requirements(), set(lines[0].split())) if lines else []
    if not lacking:
        return path
    overlay = _OVERLAY / "bin" / "python"
    below = [f"import site; site.addsitedir({folder!r})" for folder in lines[1:]]
    try:
        subprocess.run([path, "-m", "venv", "--without-pip", "--clear", _OVERLAY], check=True)
        for packages in _OVERLAY.glob("lib/python*/site-packages"):
            (packages / "below.pth").write_text("\n".join(below) + "\n", encoding="utf-8")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"going on without {', '.join(lacking)}: no environment can be made: {error}")
        return path
    print(f"installing {', '.join(lacking)} into {_OVERLAY.name} …", flush=True)
    pip = [str(overlay), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--timeout", "10", "--retries", "0", *lacking]
    try:
        subprocess.run(pip, check=True, timeout=_INSTALL_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"going on without {', '.join(lacking)}: {error}", flush=True)
        return path
    return str(overlay)


def _lines(path: str, code: str) -> list[str]:
    """The lines that Python at `path` prints; none where it fails."""
    try:
        done = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, check=True, timeout=_PROBE_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _package(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return name.group().lower().replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
