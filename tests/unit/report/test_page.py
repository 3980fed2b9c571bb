"""The page as a whole: whole, self-contained, escaped, small, and true to the records."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import msgspec
import pytest

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.records.trials import CapacityTrial, ScoreTrial, TimingTrial
from kvtriage.records.values import cache_spec
from kvtriage.report.figures import FIGURES
from kvtriage.report.page import serve_command
from kvtriage.units import format_bytes
from tests.unit.report.cases import (
    Case,
    deep,
    gemma_like,
    large,
    render,
    smollm_like,
    undecided,
    with_hostile_text,
    without_arms,
)

CASES = [gemma_like, smollm_like, undecided, large]
VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})
POISON = "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}\x00]]>"


@dataclass
class Walk(HTMLParser):
    """Reads a page and remembers what stands in it; complains of a tag that does not close."""

    open_tags: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> names an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> closes nothing"
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "script":
            self.scripts.append(data)
        elif not self.open_tags or self.open_tags[-1] != "style":
            self.text.append(data)

    def said(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def walk(page: str) -> Walk:
    found = Walk()
    found.feed(page)
    found.close()
    assert found.open_tags == []
    return found


def test_the_price_table_keeps_its_descriptions_out_of_the_columns() -> None:
    case = gemma_like()
    page, width = render(case), 3 + 2 * len(case.plan.study.buckets)
    (table,) = re.findall(r'<table class="arms">.*?</table>', page, re.DOTALL)
    priced = re.findall(r'<tr class="priced.*?</tr>', table, re.DOTALL)
    about = re.findall(r'<tr class="about.*?</tr>', table, re.DOTALL)
    assert len(priced) == len(about) == len(case.evidence.arms)
    assert {len(re.findall(r"<t[dh][ >]", row)) for row in priced} == {width}
    assert {1 + int(span) for row in about for span in re.findall(r'colspan="(\d+)"', row)} == {width}


@pytest.mark.parametrize("make", CASES)
def test_every_tag_closes_and_every_id_is_unique(make: Callable[[], Case]) -> None:
    found = walk(render(make()))
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in found.tags if tag == "a"}
    assert links == {f"#{name}" for name in ids if f"#{name}" in links}
    assert len(links) == 6


@pytest.mark.parametrize("make", CASES)
def test_nothing_is_loaded_from_anywhere(make: Callable[[], Case]) -> None:
    page = render(make())
    found = walk(page)
    assert not {tag for tag, _ in found.tags} & {"link", "img", "iframe", "object", "embed", "image", "use", "base"}
    for _, attributes in found.tags:
        assert not attributes.keys() & {"src", "srcset", "xlink:href", "style"}
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|//[a-z]|@import|url\(", page)


def test_the_policy_allows_only_the_copy_script() -> None:
    found = walk(render(gemma_like()))
    policy = next(str(a["content"]) for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert len(found.scripts) == 1
    digest = base64.b64encode(hashlib.sha256(found.scripts[0].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("make", CASES)
def test_the_page_stays_under_one_megabyte(make: Callable[[], Case]) -> None:
    assert len(render(make()).encode()) < 1_000_000


def test_a_very_deep_model_degrades_to_a_page() -> None:
    page = render(deep(2_000))
    assert len(page.encode()) < 1_000_000
    assert "The first 100 of 2,000 rows; report.json beside this page has them all." in walk(page).said()


@pytest.mark.parametrize("make", CASES)
def test_every_figure_stands_on_the_page_with_its_table(make: Callable[[], Case]) -> None:
    page = render(make())
    for name in FIGURES:
        shown = re.search(rf'<(figure|div)[^>]* id="figure-{name}">(.*?)</\1>', page, re.DOTALL)
        assert shown is not None, f"the page never asks for the figure {name}"
        if shown[1] == "figure":
            assert "<svg" in shown[2]
            assert "<details><summary>The numbers</summary>" in shown[2]
            assert "<td" in shown[2]


def test_hostile_text_stays_text() -> None:
    poisoned = with_hostile_text(gemma_like(), POISON)
    found = walk(render(poisoned))
    clean = walk(render(gemma_like()))
    kinds = {tag for tag, _ in clean.tags}
    assert {tag for tag, _ in found.tags} <= kinds | {"ul", "li"}
    assert found.scripts == clean.scripts
    said = found.said()
    assert said.count("<script>alert(1)</script>") > 20
    assert "{{ 7 * 7 }}" in said


def test_no_character_acts_unseen() -> None:
    """Control characters, and marks that would turn the words around a name, are shown as a sign in their place."""
    page = render(with_hostile_text(gemma_like(), "gpj\x1b[2J\u202eexe.\x85\x00"))
    assert not [sign for sign in page if not sign.isprintable() and sign != "\n"]
    assert "gpj\ufffd[2J\ufffdexe.\ufffd" in page


def test_hostile_arm_names_stay_text_inside_the_drawings() -> None:
    case = smollm_like()
    arms = tuple(
        msgspec.structs.replace(arm, name=POISON) if arm.name == "fp8_unit" else arm for arm in case.evidence.arms
    )
    trials = tuple(
        msgspec.structs.replace(trial, arm=POISON) if trial.arm == "fp8_unit" else trial for trial in case.trials
    )
    page = render(replace(case, evidence=msgspec.structs.replace(case.evidence, arms=arms), trials=trials))
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert any("&lt;/style&gt;" in drawing for drawing in drawings)
    assert not any("\x00" in drawing for drawing in drawings)
    assert walk(page).scripts == walk(render(case)).scripts


def test_the_verdict_comes_first() -> None:
    case = smollm_like()
    said = walk(render(case)).said()
    order = [
        "Decided: FP8 with per-head scales", case.verdict.headline, case.verdict.sentences[0], "vllm serve",
        "What these numbers cannot tell", "Price", "How far does each arm drift", "Where does FP8 hurt",
        "Does decoding get faster", "Every clause of the rule", "Reproduce it",
    ]  # fmt: skip
    places = [said.index(words, said.index("FP8 KV cache for")) for words in order]
    assert places == sorted(places)


def test_cannot_tell_says_so_and_offers_no_command() -> None:
    page = render(undecided())
    said = walk(page).said()
    assert "? Can't tell yet" in said
    assert "41 items in each cell would settle it" in said
    assert "vllm serve" not in said
    assert 'class="chosen"' not in page


def test_a_floor_that_excludes_everything_is_not_called_open() -> None:
    case = undecided()
    reasons = tuple(
        msgspec.structs.replace(reason, status="unmet") if reason.clause == "capacity" else reason
        for reason in case.verdict.reasons
    )
    page = render(replace(case, verdict=msgspec.structs.replace(case.verdict, reasons=reasons, items_needed=None)))
    said = walk(page).said()
    assert "✗ No choice" in said
    assert "Can't tell yet" not in said


def test_the_numbers_are_the_records_own() -> None:
    case = gemma_like()
    said = walk(render(case)).said()
    spec, arm = cache_spec(case.plan), next(arm for arm in case.evidence.arms if arm.name == "fp8_unit_skip")
    sheet = price_policy(spec, CachePolicy.decode(arm.policy), (1024,))
    assert format_bytes(sheet.policy_bytes) in said
    assert f"{sheet.ratio_vs_bf16:.2f}×" in said
    kl = [
        trial.metrics["kl"]
        for trial in case.trials
        if isinstance(trial, ScoreTrial) and (trial.arm, trial.task, trial.bucket) == ("fp8_unit", "text", 1024)
    ]
    assert f"{sum(value or 0.0 for value in kl) / len(kl):.6g}" in said
    assert f"{max(case.plan.max_model_len, 1):,} tokens" in said
    reason = next(reason for reason in case.verdict.reasons if reason.clause == "kl" and reason.arm == "fp8_unit")
    assert reason.value is not None
    assert f"{reason.value:.4f}" in said
    for sha256 in (case.plan.data.sha256, case.plan.model.fingerprint, case.evidence.conditions_hash):
        assert sha256 in said


def test_study_toml_on_the_page_gives_the_study_again() -> None:
    case = gemma_like()
    page = render(case)
    block = re.search(r'<code id="study">(.*?)</code>', page, re.DOTALL)
    assert block is not None
    table = tomllib.loads(block[1].replace("&#34;", '"'))
    assert msgspec.convert(table, type(case.plan.study)) == case.plan.study


@pytest.mark.parametrize(
    "names",
    [
        ("fp8_per_tensor", "fp8_unit_skip"),
        ("bf16_repeat", "bound", "fp8_sliding_only", "fp8_full_only"),
        ("fp8_unit", "fp8_per_tensor", "fp8_per_head", "fp8_per_head_skip", "fp8_unit_skip"),
        ("bf16",),
    ],
)
def test_optional_arms_may_be_missing(names: tuple[str, ...]) -> None:
    found = walk(render(without_arms(gemma_like(), *names)))
    assert "Conditions" in found.said()


@pytest.mark.parametrize("kind", [ScoreTrial, TimingTrial, CapacityTrial])
def test_a_kind_of_trial_may_be_missing(kind: type) -> None:
    case = smollm_like()
    page = render(replace(case, trials=tuple(trial for trial in case.trials if not isinstance(trial, kind))))
    said = walk(page).said()
    if kind is TimingTrial:
        assert said.count("No generation was timed.") == 2
        assert "No batch was timed." in said
    if kind is ScoreTrial:
        assert "No item of any FP8 arm could be scored." in said
    if kind is CapacityTrial:
        assert "really held" not in said


def test_unscored_and_infinite_readings_are_left_out() -> None:
    case = smollm_like()
    spoiled = tuple(
        msgspec.structs.replace(trial, metrics={**trial.metrics, "kl": None, "nll": float("nan")})
        if isinstance(trial, ScoreTrial) and trial.arm == "fp8_unit"
        else trial
        for trial in case.trials
    )
    page = render(replace(case, trials=spoiled))
    assert "nan" not in walk(page).said().lower()


def test_the_same_records_give_the_same_page() -> None:
    assert render(gemma_like()) == render(gemma_like())


def test_serve_command_quotes_for_the_shell() -> None:
    shown = serve_command(("my model; rm -rf /", "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "5"))
    assert shown == (
        "vllm serve 'my model; rm -rf /' \\\n  --kv-cache-dtype fp8 \\\n  --kv-cache-dtype-skip-layers 0 5"
    )
