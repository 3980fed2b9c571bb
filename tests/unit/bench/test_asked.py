"""What the benches may be asked: a name that there is none of is told so, with those that there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import attention, calibration, client_overhead, ragged, sensitivity, skip_sets, slope, study


@pytest.mark.parametrize(
    ("main", "words", "says"),
    [
        (sensitivity.main, ("--faults", "none", "x"), "argument --faults: invalid choice: 'x' (choose from"),
        (sensitivity.main, ("--models", "x"), "argument --models: invalid choice: 'x' (choose from"),
        (skip_sets.main, ("--models", "x"), "argument --models: invalid choice: 'x' (choose from"),
        *(
            (main, ("--model", "demo:x"), "argument --model: there is no demo model named 'demo:x'")
            for main in (calibration.main, ragged.main, slope.main, study.main)
        ),
        (calibration.main, ("--bound", "much"), "argument --bound: invalid parse_bytes value: 'much'"),
        *(
            (study.main, (word, "0"), f"argument {word}: 0 is too few")
            for word in ("--rounds", "--threads", "--workers")
        ),
        (study.main, ("--tokens", "511"), "argument --tokens: 511 is too few, there must be 512"),
        *((main, ("--threads", "0"), "argument --threads: 0 is too few") for main in (attention.main, ragged.main)),
        (ragged.main, ("--model", "tests"), "has no config.json"),
        (client_overhead.main, ("--streams", "x"), "argument --streams: invalid int value: 'x'"),
    ],
)
def test_an_unknown_name_is_refused(
    main: Callable[[], int | None],
    words: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err
