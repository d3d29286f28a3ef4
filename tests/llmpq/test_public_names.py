"""The names that users import, and that they need nothing heavy to do so."""

from __future__ import annotations

import re
import subprocess
import sys

import llmpq
import llmpq.errors
import quant.common.errors
from tests.paths import ROOT

PAGE = ROOT / "docs" / "python.md"


def test_the_package_offers_these_names() -> None:
    assert set(llmpq.__all__) - errors() == {
        "Cluster",
        "Fleet",
        "InputJob",
        "Job",
        "LengthDistribution",
        "Plan",
        "RequestLengths",
        "Result",
        "Results",
        "RunSummary",
        "Sampling",
        "Session",
        "Workload",
        "job_of_input",
        "request_lengths",
    }
    assert all(getattr(llmpq, name) for name in llmpq.__all__)


def errors() -> set[str]:
    """Every exception that is defined."""
    return {
        name
        for name, value in vars(quant.common.errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def test_every_error_can_be_imported_from_the_package_and_from_one_place() -> None:
    assert set(llmpq.errors.__all__) == errors() <= set(llmpq.__all__)
    for name in errors():
        defined = getattr(quant.common.errors, name)
        assert getattr(llmpq, name) is getattr(llmpq.errors, name) is defined


def test_the_page_names_all_of_them_and_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tables = {
        name: re.findall(r"^\| `(\w+)` \|(.*)", part, re.MULTILINE)
        for name, part in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    }
    assert {name for name, _ in tables["Errors"]} == errors()
    assert {name for name, _ in tables["Names"]} == set(llmpq.__all__) - errors()
    for name, cells in tables["Errors"]:
        (base,) = getattr(llmpq, name).__bases__
        assert cells.strip().startswith(f"`{base.__name__}`")
    for name, cells in tables["Names"]:
        for attribute in re.findall(r"`(\w+)`", cells):
            known = getattr(llmpq, name)
            fields = getattr(known, "__dataclass_fields__", {})
            inside = attribute in fields or hasattr(known, attribute)
            assert inside or attribute in llmpq.__all__ or attribute == "run"


def test_importing_them_loads_neither_torch_nor_ray() -> None:
    code = "import sys, llmpq, llmpq.errors; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
