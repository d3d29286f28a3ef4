"""Programs of schedulers and machines that only note how they are called, for recipes to run."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

NOTE = f"""#!{sys.executable}
import json, os, signal, sys
names = ("MACHINE", "CUDA_VISIBLE_DEVICES", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS")
call = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(os.environ["NOTES"], "a") as file:
    file.write(json.dumps([call, {{name: os.environ.get(name) for name in names}}]) + "\\n")
"""

BLOCKING = f"""{NOTE}
if "--block" in sys.argv:
    signal.pause()
"""

SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
exec "$@"
"""

SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
export MACHINE=$1 HOME=$HOMES/$1
mkdir -p "$HOME" && cd "$HOME" && shift
exec bash -c "$*"
"""

JOB = """#!/bin/bash
trap 'echo USR1 >> "$NOTES.signals"; exit 138' USR1
trap 'echo TERM >> "$NOTES.signals"; exit 143' TERM
touch "$NOTES.ready"
while :; do sleep 0.05; done
"""

SMI = """#!/bin/bash
printf '%s\\n' 'GPU-1, NVIDIA L4' 'GPU-2, NVIDIA A100-SXM4-40GB' 'GPU-3, Tesla T4'
"""


@dataclass(frozen=True)
class Call:
    words: list[str]
    variables: dict[str, str | None]

    def option(self, name: str) -> str | None:
        found = [word for word in self.words if word.startswith(f"--{name}=")]
        return found[0].partition("=")[2] if found else None

    @property
    def resources(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.option("resources") or "{}")
        return found


class Stubs:
    """A folder of such programs, and the calls of them."""

    def __init__(self, folder: Path) -> None:
        self.notes, self._bin = folder / "notes", folder / "bin"
        self._bin.mkdir()
        programs = {"srun": SRUN, "ssh": SSH, "nvidia-smi": SMI}
        programs |= dict.fromkeys(("llmpq", "python", "scontrol"), NOTE) | {"ray": BLOCKING}
        programs["hostname"] = "#!/bin/bash\necho ${MACHINE:-10.0.0.1}\n"
        programs["getent"] = "#!/bin/bash\necho 127.0.1.1 STREAM; echo 10.0.0.1 STREAM\n"
        for name, text in programs.items():
            self.add(name, text)
        self.environment = os.environ | {
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "NOTES": str(self.notes),
            "HOMES": str(folder / "homes"),
            "HOME": str(folder),
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "old",
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def add(self, name: str, text: str) -> None:
        path = self._bin / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self, program: str, *first: str) -> list[Call]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        calls = [Call(*json.loads(line)) for line in lines]
        return [call for call in calls if call.words[: 1 + len(first)] == [program, *first]]
