"""The arms' colours can be told apart, by people who see fewer of them too, and their words can be read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtriage.report.page import read_asset

Vector = NDArray[np.float64]

FOUR = ("arm-bf16", "arm-fp8-tensor", "arm-fp8-head", "arm-skip")
WORDS = ("text", "soft", "faint", "good", "bad", "open")
SEEN_AS: dict[str, list[list[float]]] = {
    "trichromat": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB."""
XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def palette(dark: bool) -> dict[str, str]:
    """The style sheet's variables, light or dark."""
    light, _, rest = read_asset("style.css").partition("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    return found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", rest.partition("* {")[0])) if dark else found


def linear(colour: str) -> Vector:
    part = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb: Vector) -> Vector:
    xyz = np.array(XYZ) @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    bent = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * bent[1] - 16, 500 * (bent[0] - bent[1]), 200 * (bent[1] - bent[2])])


def contrast(one: str, other: str) -> float:
    light = sorted(float(np.array(XYZ[1]) @ linear(colour)) for colour in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("eyes", SEEN_AS)
def test_the_four_arms_are_told_apart(eyes: str, dark: bool) -> None:
    colours = palette(dark)
    seen: Callable[[str], Vector] = lambda name: lab(np.array(SEEN_AS[eyes]) @ linear(colours[name]))  # noqa: E731
    apart = {pair: float(np.linalg.norm(seen(pair[0]) - seen(pair[1]))) for pair in itertools.combinations(FOUR, 2)}
    assert min(apart.values()) > 25, apart


@pytest.mark.parametrize("dark", [False, True])
def test_marks_and_words_stand_out_from_the_page(dark: bool) -> None:
    colours = palette(dark)
    marks = {name: contrast(colours[name], colours["page"]) for name in colours if name.startswith("arm-")}
    words = {name: contrast(colours[name], colours["page"]) for name in WORDS}
    assert min(marks.values()) >= 2.9, marks
    assert min(words.values()) >= 4.5, words
