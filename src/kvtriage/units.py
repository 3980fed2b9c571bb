"""Quantities for people. The only code that prints GiB, ms or a token count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "format_bytes",
    "format_bytes_alike",
    "format_change",
    "format_count",
    "format_rough",
    "format_seconds",
    "format_tokens",
    "parse_bytes",
    "parse_short_number",
]

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_SUFFIXES = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_DECIMAL: Mapping[str, int] = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Mapping[str, int] = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def format_bytes(count: float) -> str:
    """1536 → '1.5 KiB'; exact below 1 KiB. The sign is kept.

    Three significant digits are enough to compare; JSON keeps the bytes.
    """
    unit, name = _unit_of(count)
    return f"{count / unit:,.1f} {name}" if unit > 1 else f"{count:,.0f} B"


def format_bytes_alike(counts: Sequence[float]) -> tuple[str, ...]:
    """Amounts to be compared, all in one unit: ('1,155.4 MiB', '577.7 MiB').

    The smallest that is not 0 has at least two digits before the point, so that a hundredth of it is seen.
    """
    unit, name = _unit_of(min([abs(count) for count in counts if count], default=0) / 10)
    return tuple(f"{count / unit:,.1f} {name}" if unit > 1 else f"{count:,.0f} B" for count in counts)


def _unit_of(count: float) -> tuple[int, str]:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return unit, name
    return 1, "B"


def format_seconds(seconds: float) -> str:
    """0.0123 → '12.3 ms'; 75 → '1 min 15 s'."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_change(ratio: float) -> str:
    """1.331 → '+33.1%', and '0.0%' where it rounds to nothing."""
    share = round(ratio - 1, 3)
    return f"{share:+.1%}" if share else "0.0%"


def format_count(count: int, what: str) -> str:
    """(1, 'layer') → '1 layer', (1024, 'layer') → '1,024 layers'."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def format_tokens(count: float) -> str:
    """929341 → '929,341'."""
    return f"{count:,.0f}"


def format_rough(value: float) -> str:
    """Two significant digits: 2427540 → '2,400,000', 74.08 → '74', 1.42 → '1.4'."""
    rounded = float(f"{value:.1e}")
    return f"{rounded:,.1f}" if abs(rounded) < 10 else f"{rounded:,.0f}"


def parse_short_number(text: str) -> int:
    """'32768', and as vLLM reads it (human_readable_int) '32k' → 32000, '32K' → 32768, '25.6k' → 25600.

    Raises ValueError on anything else, and on a part of a binary unit.
    """
    found = re.fullmatch(r"([0-9]{1,19})(\.[0-9]{1,9})?([kKmMgGtT])?", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!a} is not a number")
    whole, part, unit = found.groups()
    if unit in _DECIMAL:
        return int(float(whole + (part or "")) * _DECIMAL[unit])
    if part is not None:
        raise ValueError(f"{text!a} is not whole")
    return int(whole) * (1 if unit is None else _BINARY[unit])


def parse_bytes(text: str) -> int:
    """'16GiB' → 17179869184, and '16G' as vLLM reads it. Raises ValueError on anything else than NUMBER[UNIT]."""
    if re.fullmatch(r"[0-9.]+[kKmMgGtT]", text.strip(), re.ASCII):
        return _checked_bytes(text, parse_short_number(text.strip()))
    cleaned = text.strip().lower()
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    suffix = cleaned[len(digits) :].strip()
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} has an unknown unit")
    return _checked_bytes(text, float(digits) * _SUFFIXES[suffix])


def _checked_bytes(text: str, count: float) -> int:
    if not 1 <= count < 2**63:
        raise ValueError(f"{text!r} is not a positive number of bytes")
    return int(count)
