"""plan: what no study measures, and what is said of a study before it runs."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from kvtriage.errors import UnsupportedModel
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.stages.plan import check_studied
from tests.unit.kvcache.architectures import DEEPSEEK_V32
from tests.unit.stages.fake_case import STUDY, FakeCase, hybrid, uniform


def test_what_is_not_measured_is_refused_by_layer() -> None:
    with pytest.raises(UnsupportedModel, match=r"layer 0 of \S+ is of the kind latent with more than K and V"):
        check_studied(DEEPSEEK_V32)
    layers = (*uniform().layers, LayerSpec(6, LayerKind.FULL, 4, 2, 8, 8, shares_with=5))
    with pytest.raises(UnsupportedModel, match="layer 6 of test reads the cache of layer 5"):
        check_studied(CacheSpec("test", layers, 1024))
    check_studied(hybrid())


def test_a_study_that_stays_within_the_window_is_warned_of() -> None:
    said = FakeCase(spec=hybrid(window=128)).plan.warnings
    assert any("no bucket is longer than the sliding window of 128 tokens" in text for text in said)
    assert not any("sliding window" in text for text in FakeCase(spec=hybrid(window=64)).plan.warnings)


def test_short_calibration_is_warned_of() -> None:
    assert any("calibration reads 64 tokens of a text while contexts reach 128" in t for t in FakeCase().plan.warnings)
    covered = FakeCase(study=msgspec.structs.replace(STUDY, calibration_tokens=128))
    assert not covered.plan.warnings


def test_a_model_of_windows_alone_is_warned_of() -> None:
    spec = hybrid()
    windows = tuple(dataclasses.replace(layer, kind=LayerKind.SLIDING, window_tokens=48) for layer in spec.layers)
    said = FakeCase(spec=dataclasses.replace(spec, layers=windows)).plan.warnings
    assert "every layer has a sliding window: capacity stops falling beyond it" in said
