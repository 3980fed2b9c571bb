"""Numbers as people read them. Bytes, seconds and token counts come from `kvtriage.units`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter

__all__ = [
    "Sentence",
    "Shown",
    "as_set",
    "axis_number",
    "axis_percent",
    "axis_tokens",
    "exact",
    "interval",
    "percent",
    "rounded",
    "say",
    "signed",
    "times",
]

_MINUS = "\N{MINUS SIGN}"
_SUPERSCRIPT = str.maketrans("-0123456789", "\N{SUPERSCRIPT MINUS}⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Shown:
    """A number that has a form of its own: what it is, and how it reads."""

    value: float
    text: str


@dataclass(frozen=True)
class Sentence:
    """What is said, and the numbers that are said in it, by name."""

    text: str
    numbers: Mapping[str, float]


def say(template: str, **given: Shown | str) -> Sentence:
    """'{kl} nats' with kl=Shown(0.0229, '0.0229') → '0.0229 nats', which keeps that kl is 0.0229."""
    words = {name: value.text if isinstance(value, Shown) else value for name, value in given.items()}
    asked = {name for _, name, _, _ in Formatter().parse(template)}
    numbers = {name: value.value for name, value in given.items() if name in asked and isinstance(value, Shown)}
    return Sentence(template.format(**words), numbers)


def rounded(value: float, digits: int = 3) -> str:
    """Three significant digits: 0.01134 → '0.0113', 3.2e-7 → '3.2 × 10⁻⁷'."""
    if math.isnan(value):
        return "not known"
    if math.isinf(value):
        return f"{_MINUS}∞" if value < 0 else "∞"
    sign = _MINUS if value < 0 else ""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-4:
        mantissa, exponent = f"{size:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{sign}{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{sign}{size:,.{places}f}"


def signed(value: float) -> str:
    """As `rounded`, with a plus in front of what is above zero."""
    return f"+{rounded(value)}" if value > 0 else rounded(value)


def exact(value: float) -> str:
    """Six significant digits, for tables; an end that is nowhere is 'unbounded'."""
    if math.isinf(value):
        return "unbounded"
    if math.isnan(value):
        return rounded(value)
    return f"{value:.6g}".replace("-", _MINUS)


def as_set(value: float) -> str:
    """A margin of the rule as it was written: 0.05 → '0.05'."""
    return f"{value:g}".replace("-", _MINUS)


def percent(share: float) -> str:
    """0.0573 → '5.7 %'; tiny shares keep two digits: 0.00021 → '0.021 %'."""
    if not math.isfinite(share):
        return rounded(share)
    points = abs(share) * 100
    sign = _MINUS if share < 0 else ""
    if points == 0:
        return "0 %"
    if points < 0.0001:
        return f"{sign}<0.0001 %"
    places = 1 if points >= 1 else 1 - math.floor(math.log10(points))
    return f"{sign}{points:.{places}f} %"


def interval(low: float, high: float, form: Callable[[float], str] = rounded) -> str:
    """'0.0091 to 0.0135'; one reading has none."""
    if math.isinf(low) or math.isinf(high):
        return "no interval"
    return f"{form(low)} to {form(high)}"


def times(ratio: float) -> str:
    """1.99225 → '1.99×'."""
    return f"{ratio:.2f}×"


def axis_number(value: float) -> str:
    """A tick: no trailing zeros, thousands and millions shortened."""
    size = abs(value)
    sign = _MINUS if value < 0 else ""
    if size >= 1e6:
        return f"{sign}{size / 1e6:g}M"
    if size >= 1e4:
        return f"{sign}{size / 1e3:g}k"
    if 0 < size < 1e-4:
        return rounded(value, 1)
    return f"{sign}{size:g}"


def axis_percent(share: float) -> str:
    """A tick, or a share as it was set, without the zeros that measured ones keep: 0.05 → '5 %'."""
    return f"{share * 100:g} %".replace("-", _MINUS)


def axis_tokens(value: float) -> str:
    """A context length, as vLLM reads one: 1024 → '1K', 300 → '300'."""
    tokens = round(value)
    if tokens >= 1024 and tokens % 1024 == 0:
        return f"{tokens // 1024}K"
    return f"{tokens:,}"
