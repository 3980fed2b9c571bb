"""Ragged batches: what they hold, and what the table of benches reads of them."""

from __future__ import annotations

import numpy as np

from bench.ragged import Ragged, batches, entries
from bench.table import read_rows


def test_ragged_and_equal_hold_as_many_tokens() -> None:
    lengths = batches(4, 2_048, 3_840)
    assert lengths["ragged"].tolist()[0] == 256
    assert lengths["ragged"].sum() == lengths["equal"].sum()
    assert np.all(lengths["padded"] == lengths["ragged"].max())


def test_the_table_reads_a_row_for_each_batch_of_several() -> None:
    found = [
        Ragged("one layer", 4, (1.0, 3.0), (2.0, 2.0), (4.0, 4.0)),
        Ragged("whole model", 1, (1.0,), (1.0,), (2.0,)),
    ]
    (row,) = read_rows("ragged.py", entries(found))
    assert row.what == "one layer, 4 sequences, different lengths / one"
    assert row.ratios == (0.5, 1.5)
