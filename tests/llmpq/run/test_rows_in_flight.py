"""Rows between request and result: their own columns wait here, and none is left behind."""

from __future__ import annotations

from actors.messages import Finished, Request, Sampling
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.monitoring.meter import RunMeter
from llmpq.run.rows_in_flight import RowsInFlight
from llmpq.tokenizing.requests import RequestMaker
from planner.workload import Workload

SHORT, LONG = Workload(4, 8, 6), Workload(1, 64, 6)
ROWS = [
    Row("short", token_ids=(1, 2), columns={"topic": "s"}),
    Row("long", token_ids=(1,) * 60, columns={"topic": "l", "tags": ["x"]}),
    Row("too long", token_ids=(1,) * 99, columns={"topic": "t"}),
    BadRow("bad", "malformed", {"topic": "b"}),
    Row("stage", token_ids=(3,), columns={"topic": "e"}),
    Row("plain", token_ids=(4,)),
]


def ended(request: Request) -> Finished:
    failed = request.custom_id == "stage"
    return Finished(request.custom_id, (7,), "error" if failed else "length", "lost" * failed)


def test_every_result_has_the_columns_of_its_row() -> None:
    maker = RequestMaker(SHORT, 100, Sampling(), None, LONG)
    rows = RowsInFlight(maker, RunMeter(None, None))
    results: list[Result] = []
    requests = [each for each in rows.requests(maker.requests(rows.taken_in(ROWS))) if each]
    results += rows.bad_results()
    assert not any(hasattr(request, "columns") for request in requests)  # stages do not see them
    for request in (*requests, *rows.long_requests()):
        assert request is not None
        results += rows.results([ended(request)])
    found = {result.custom_id: (dict(result.columns), result.error) for result in results}
    assert {name: columns for name, (columns, _) in found.items()} == {
        row.custom_id: row.columns for row in ROWS
    }
    assert found["stage"][1] == "lost"
    assert found["bad"][1] == "malformed"
    assert "plan has room for 64" in str(found["too long"][1])
    assert rows.columns_held == 0
    rows.long.close()
