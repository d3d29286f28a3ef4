"""The database of a job: many rows at once are judged as one by one, against plain dictionaries."""

from __future__ import annotations

import random

import pytest

from llmpq.jobs.row_database import Done, RowDatabase, Tally, WantedRow


def random_results(rng: random.Random, count: int) -> list[tuple[str, Done]]:
    """Results of fewer ids than there are: some errors, of which some are forgotten."""
    results = []
    for line in range(count):
        failed = rng.random() < 0.4
        done = Done(f"f{rng.randrange(2)}", failed, 1, line, failed and rng.random() < 0.3)
        results.append((f"id{rng.randrange(count // 2)}", done))
    return results


def judged(results: list[tuple[str, Done]]) -> tuple[dict[str, Done], int]:
    """What counts of each id, and how many lines the output must get rid of."""
    kept: dict[str, Done] = {}
    for custom_id, done in results:
        earlier = kept.get(custom_id)
        if earlier is None or earlier.failed or earlier.forgotten:
            kept[custom_id] = done
    lines = {done.line for done in kept.values() if not done.forgotten}
    return kept, len(results) - len(lines)


@pytest.mark.parametrize("seed", range(12))
def test_many_results_are_judged_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmpq.jobs.row_database.BATCH_ROWS", 7)
    results = random_results(random.Random(seed), 60)
    kept, replaced = judged(results)
    single, many = RowDatabase(), RowDatabase()
    for custom_id, done in results:
        assert single.record(custom_id, done) == (single.done(custom_id) == done)
    many.record_all(iter(results))
    for database in (single, many):
        assert {custom_id: database.done(custom_id) for custom_id, _ in results} == kept
        assert database.replaced == replaced
        counted = [
            done.line for custom_id, done in results if database.counts(custom_id, 1, done.line)
        ]
        assert len(counted) == len(results) - replaced
    wanted = [WantedRow(f"id{i}", f"f{i % 2}", i, i) for i in range(40)]
    done = {
        row.custom_id: kept[row.custom_id]
        for row in wanted
        if row.custom_id in kept
        and not kept[row.custom_id].forgotten
        and kept[row.custom_id].fingerprint == row.fingerprint
    }
    assert many.want_all(wanted) is None
    assert many.tally() == Tally(
        len(wanted),
        len(done),
        sum(each.failed for each in done.values()),
        sum(row.tokens for row in wanted if row.custom_id not in done),
    )
    others = [
        row.place
        for row in wanted
        if row.custom_id in kept
        and not kept[row.custom_id].failed
        and kept[row.custom_id].fingerprint != row.fingerprint
    ]
    assert many.has_other_result() == bool(others)


@pytest.mark.parametrize("second", [1, 5, 6, 7, 20])
def test_an_id_that_comes_twice_is_found_with_both_places(
    second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.jobs.row_database.BATCH_ROWS", 3)
    rows = [WantedRow(f"id{i}", "f", 10 * i, 1) for i in range(21)]
    rows[second] = rows[second]._replace(custom_id="id0")
    assert RowDatabase().want_all(rows) == (10 * second, 0)
