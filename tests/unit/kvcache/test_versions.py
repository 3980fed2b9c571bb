from __future__ import annotations

import pytest

from kvtriage.errors import BadInput
from kvtriage.kvcache.versions import MODELLED, EngineVersion


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("v0.26", (0, 26, 0)),
        (" 0.9.1\n", (0, 9, 1)),
        ("0.23.1rc1.dev531", (0, 23, 1)),
        ("0.19.1rc1.dev301+g60995c05b", (0, 19, 1)),
        ("0.7.0.post1", (0, 7, 0)),
        ("0.10.2+cu128", (0, 10, 2)),
    ],
)
def test_releases_and_builds_on_the_way_to_them(text: str, version: tuple[int, int, int]) -> None:
    assert EngineVersion.parse(text) == EngineVersion(*version)


@pytest.mark.parametrize("text", ["2026-08", "main", "", "0", "0.x", "0.32.0; rm", "0." + "9" * 40, "\u0660.\u0663"])
def test_what_is_no_version_is_said_in_one_line(text: str) -> None:
    with pytest.raises(BadInput, match="is not a version of vLLM") as caught:
        EngineVersion.parse(text)
    assert "\n" not in caught.value.message


def test_a_build_that_does_not_know_its_release_is_no_version() -> None:
    with pytest.raises(BadInput, match="does not say which release"):
        EngineVersion.parse("0.1.dev20073")


def test_releases_are_ordered_as_numbers() -> None:
    assert EngineVersion(0, 9, 2) < EngineVersion(0, 10) < EngineVersion(0, 21) < MODELLED < EngineVersion(1, 0)


@pytest.mark.parametrize(
    ("version", "by_blocks", "from_concurrency"),
    [((0, 9, 0), False, False), ((0, 9, 1), True, False), ((0, 20, 2), True, False), ((0, 21, 0), True, True)],
)
def test_what_the_line_means(version: tuple[int, int, int], by_blocks: bool, from_concurrency: bool) -> None:
    found = EngineVersion(*version)
    assert (found.counts_requests_by_blocks, found.derives_tokens_from_concurrency) == (by_blocks, from_concurrency)


@pytest.mark.parametrize(
    ("version", "ahead", "stages", "batches"),
    [
        (EngineVersion(0, 25), True, 1, 1),
        (EngineVersion(0, 25), True, 4, 1),
        (EngineVersion(0, 26), True, 1, 2),
        (EngineVersion(0, 26), False, 1, 1),
        (MODELLED, True, 4, 5),
        (MODELLED, False, 4, 4),
    ],
)
def test_batches_in_flight(version: EngineVersion, ahead: bool, stages: int, batches: int) -> None:
    assert version.batches_in_flight(async_scheduling=ahead, pipeline_parallel=stages) == batches


def test_whether_states_are_kept_by_prefix_is_known_at_both_ends() -> None:
    kept = [EngineVersion(0, minor).keeps_states_by_prefix for minor in (19, 20, 31, 32)]
    assert kept == [False, None, None, True]


def test_the_release_that_is_modelled_needs_no_caveat_and_every_other_has_one() -> None:
    assert EngineVersion(0, 32, 1).caveats(skips_layers=True, is_recurrent=True) == ()
    old = EngineVersion(0, 8).caveats(skips_layers=True, is_recurrent=True)
    assert [word in " ".join(old) for word in ("0.32.0", "sliding layer", "skipped layers")] == [True] * 3
    assert any("recurrent" in said for said in EngineVersion(0, 25).caveats(is_recurrent=True))
    assert len(EngineVersion(0, 33).caveats(skips_layers=True, is_recurrent=True)) == 1
