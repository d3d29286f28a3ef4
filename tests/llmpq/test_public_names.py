"""The names that users import, and that they need nothing heavy to do so."""

from __future__ import annotations

import subprocess
import sys

import llmpq
import llmpq.errors
import quant.common.errors


def test_the_package_offers_these_names() -> None:
    assert set(llmpq.__all__) == {
        "Cluster",
        "InputJob",
        "Job",
        "LlmpqError",
        "Plan",
        "Result",
        "Sampling",
        "Workload",
        "job_of_input",
    }


def test_every_error_can_be_imported_from_one_place() -> None:
    defined = {
        name
        for name, value in vars(quant.common.errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(llmpq.errors.__all__) == defined
    assert all(getattr(llmpq.errors, name) for name in defined)


def test_importing_them_loads_neither_torch_nor_ray() -> None:
    code = "import sys, llmpq, llmpq.errors; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
