"""What tests of several rooms of the actors share."""

from __future__ import annotations

import pytest

from tests.actors.pretend_nccl import PretendGpus


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> PretendGpus:
    """NCCL of this process is a pretend one."""
    pretend = PretendGpus()
    monkeypatch.setattr("actors.transport.collectives.nccl_group", pretend.group)
    monkeypatch.setattr("actors.transport.nccl_links.nccl_group", pretend.group)
    monkeypatch.setattr("actors.transport.nccl_links.gpu_name", pretend.name)
    return pretend
