"""The machines: names, memory, and the defaults that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtriage.errors import BadInput
from kvtriage.kvcache.support.gpus import GPUS, SHORT_NAMES, Platform, default_max_num_batched_tokens, find_gpu
from kvtriage.units import GIB


def test_every_name_finds_its_gpu() -> None:
    assert [find_gpu(gpu.name) for gpu in GPUS] == list(GPUS)
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


@pytest.mark.parametrize(("said", "name"), [("H100", "h100-80g"), (" RTX 4090 ", "rtx-4090"), ("a100", "a100-80g")])
def test_names_as_people_write_them(said: str, name: str) -> None:
    assert find_gpu(said).name == name


def test_the_reference_page_lists_every_name() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "support.md").read_text()
    for gpu in GPUS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{gpu.name}`")]
        assert gpu.described in row
        assert all(f"`{short}`" in row for short, name in SHORT_NAMES.items() if name == gpu.name)


def test_an_unknown_gpu_is_named_and_the_known_ones_listed() -> None:
    with pytest.raises(BadInput, match="'h1000'") as caught:
        find_gpu("h1000")
    assert "h100-80g" in caught.value.hint


def test_sm_of_each_generation() -> None:
    generations = {gpu.sm for gpu in GPUS if gpu.platform is Platform.CUDA}
    assert generations == {70, 75, 80, 86, 89, 90, 100, 120}
    assert find_gpu("cpu").sm == find_gpu("mi300x").sm == 0
    assert find_gpu("h200").described == "H200 (sm90)"


def test_memory_is_less_than_the_box_says_and_more_than_nine_tenths_of_it() -> None:
    for name, box in {"h100-80g": 80, "h200": 141, "b200": 192, "t4": 16, "l40s": 48, "rtx-5090": 32}.items():
        low, high = find_gpu(name).memory_bytes
        assert 0.88 * box * GIB < low <= high < box * GIB


def test_a_cpu_has_no_memory_of_its_own() -> None:
    with pytest.raises(BadInput, match="no memory size"):
        _ = find_gpu("cpu").memory_bytes


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("b200", 16384),
        ("mi300x", 16384),
        ("h100-80g", 8192),
        ("h200", 8192),
        ("rtx-pro-6000", 8192),
        ("a100-80g", 2048),
        ("l40s", 2048),
        ("t4", 2048),
        ("xpu", 2048),
    ],
)
def test_batch_defaults(name: str, tokens: int) -> None:
    assert default_max_num_batched_tokens(find_gpu(name)) == tokens


def test_batch_defaults_of_cpus_grow_with_the_ranks() -> None:
    assert default_max_num_batched_tokens(find_gpu("cpu"), world_size=2) == 4096
