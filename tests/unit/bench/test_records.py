"""Where tokens came from."""

from compspec.bench.records import origins
from tests.unit.bench.records import step


def test_every_token_has_the_origin_that_its_step_gave_it() -> None:
    steps = [step(1.0), step(2.0), step(3.0, 3, 2, 2), step(4.0, 2, 3, 1), step(5.0, 1, 3, 0)]
    assert "".join(origins(steps)) == "f" + "p" + "aab" + "ac" + "c"


def test_a_window_that_an_end_cut_within_its_drafts_has_neither_correction_nor_bonus() -> None:
    assert "".join(origins([step(1.0), step(2.0, 2, 4, 2)])) == "faa"
