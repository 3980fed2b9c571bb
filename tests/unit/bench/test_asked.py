"""What the benches may be asked: a name that there is none of is told so, with those that there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import client_overhead, sensitivity, skip_sets


@pytest.mark.parametrize(
    ("main", "words", "says"),
    [
        (sensitivity.main, ("--faults", "none", "x"), "argument --faults: invalid choice: 'x' (choose from"),
        (sensitivity.main, ("--models", "x"), "argument --models: invalid choice: 'x' (choose from"),
        (skip_sets.main, ("--models", "x"), "argument --models: invalid choice: 'x' (choose from"),
        (client_overhead.main, ("--streams", "x"), "argument --streams: invalid int value: 'x'"),
    ],
)
def test_an_unknown_name_is_refused(
    main: Callable[[], int],
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
