"""The table of open loops: one row for each arm and rate, and none where there were none."""

from __future__ import annotations

from dataclasses import replace

from kvtriage.records.trials import LoadTrial
from kvtriage.report.load import under_load
from kvtriage.report.view import CaseView
from tests.unit.report.cases import CONDITIONS_HASH, Case, gemma_like, render


def view_of(case: Case) -> CaseView:
    return CaseView(case.plan, case.scales, case.sensitivities, case.evidence, case.trials, case.verdict)


def load(arm: str, rate: float, ttft_s: tuple[float, ...]) -> LoadTrial:
    count = len(ttft_s)
    return LoadTrial(
        arm=arm,
        request_rate=rate,
        context_len=512,
        due_s=tuple(i / rate for i in range(count)),
        ttft_s=ttft_s,
        token_s=((0.010, 0.020),) * count,
        conditions=CONDITIONS_HASH,
    )


def test_where_no_rates_were_asked_for_there_is_no_table() -> None:
    assert under_load(view_of(gemma_like())) is None


def test_a_row_for_each_rate_and_arm() -> None:
    case = gemma_like()
    times = tuple(0.1 * (i + 1) for i in range(20))
    loads = [load(arm, rate, times) for arm in ("fp8_unit", "bf16") for rate in (4.0, 2.0)]
    found = under_load(view_of(replace(case, trials=(*case.trials, *loads))))
    assert found is not None
    said, table = found
    assert said.startswith("20 requests of 512 tokens came at random")
    assert [row[1] for row in table.rows] == ["2", "2", "4", "4"]
    assert [row[0] for row in table.rows[:2]] == ["BF16", table.rows[3][0]]
    assert table.rows[0][3:] == ("1.0 s", "1.9 s", "10.0 ms", "20.0 ms")
    finished = 20 / (19 / 2 + 2.0 + 0.030)
    assert float(table.rows[0][2]) == round(finished, 2)


def test_it_stands_on_the_page() -> None:
    case = gemma_like()
    page = render(replace(case, trials=(*case.trials, load("bf16", 2.0, (0.5, 0.6)))))
    assert "Requests that come at a rate" in page
    assert "Requests that come at a rate" not in render(case)
