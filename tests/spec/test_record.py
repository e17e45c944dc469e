"""Records are read back as they were written."""

from lockstep.spec import Record
from lockstep.spec.record import read_records, write_records


def test_records_are_read_back_equal(tmp_path) -> None:
    record = Record(
        name="step",
        value=0.1,
        unit="ms",
        n=5,
        spread=(0.09, 0.2),
        hardware="2 cores",
        command="bench",
        commit="abc",
        versions={"torch": "2.13"},
        details={"batch": 256, "note": "läuft"},
    )
    path = tmp_path / "new" / "records.json"
    write_records(path, [record, record])
    assert read_records(path) == [record, record]
