import json

import pytest

from planner.prediction import PREDICTOR_FILE, PredictorFile, predictor_file
from quant.common.errors import SpecError

GOOD = {
    "version": 1,
    "kind": "boosting",
    "buckets": [10, 20],
    "trained_rows": 7,
    "confusion": [[3, 1], [0, 2]],
}


def write(folder, **changes):
    kept = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    (folder / PREDICTOR_FILE).write_text(json.dumps(kept))


def test_a_predictor_file_is_read_as_it_was_written(tmp_path):
    written = PredictorFile.model_validate(GOOD | {"tokenizer": "ab12"})
    (tmp_path / PREDICTOR_FILE).write_text(written.model_dump_json())
    assert predictor_file(tmp_path) == written


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"buckets": [20, 10]}, "buckets: 10 follows 20"),
        ({"buckets": []}, "field buckets"),
        ({"buckets": [0, 10]}, "field buckets.0"),
        ({"confusion": [[1, 2]]}, "confusion: it must have 2 rows"),
        ({"confusion": [[1, 2], [3]]}, "confusion: it must have 2 rows"),
        ({"confusion": [[0, 0], [0, 0]]}, "confusion: it counts no row"),
        ({"confusion": [[1, -2], [0, 0]]}, "field confusion.0.1"),
        ({"kind": "pickle"}, "field kind"),
        ({"version": 2}, "field version"),
        ({"trained_rows": ...}, "field trained_rows"),
        ({"weights": "x"}, "field weights"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path, changes, named):
    write(tmp_path, **changes)
    with pytest.raises(SpecError, match="llmpq lengths train") as refused:
        predictor_file(tmp_path)
    assert named in str(refused.value)
    assert str(tmp_path / PREDICTOR_FILE) in str(refused.value)


def test_a_folder_without_the_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        predictor_file(tmp_path)
