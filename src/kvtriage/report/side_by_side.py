"""Two cases on one page: what differs between them, what each decides, and how far their arms drift."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from markupsafe import Markup

from kvtriage.records.evidence import ArmRecord
from kvtriage.records.pairing import Item
from kvtriage.report.arms import style_of
from kvtriage.report.beside import encode_beside
from kvtriage.report.brief import Told, describe_choice, tell_in_brief
from kvtriage.report.charts.dots import DotGroup, DotRow, draw_dots
from kvtriage.report.comparison import Difference, asked_alike, only_difference, other_kl
from kvtriage.report.figures.base import Absent, Cell, Figure, Panel, Table
from kvtriage.report.figures.quality import to_row
from kvtriage.report.numbers import axis_number, axis_percent, interval, signed
from kvtriage.report.page import Report, open_templates, read_asset, serve_command
from kvtriage.report.quality import METRICS, Metric, drift_of
from kvtriage.report.terms import explain_terms
from kvtriage.report.timings import crossing_with_baseline
from kvtriage.report.view import CaseView
from kvtriage.stats import Interval, paired_interval

__all__ = ["render_comparison"]

_TEMPLATE = "compare.html.jinja"
_QUESTION = "How far does each arm drift in either case?"
_SIDES = ("A", "B")


@dataclass(frozen=True)
class _Side:
    """One case under its letter."""

    letter: str
    name: str
    view: CaseView
    choice: str
    brief: tuple[Told, ...]
    command: str
    """Empty where none follows."""


def render_comparison(a: CaseView, b: CaseView, names: tuple[str, str]) -> Report:
    """One HTML document and its JSON. Raises CaseError where the two may not be compared."""
    difference = only_difference(a, b)
    sides = tuple(
        _Side(
            letter,
            name,
            view,
            describe_choice(view.verdict.choice, len(view.plan.layers)),
            tell_in_brief(view),
            _command(view),
        )
        for letter, name, view in zip(_SIDES, names, (a, b), strict=True)
    )
    figures: dict[str, Figure | Absent] = {"drift": _draw_drift(a, b)}
    speed = _speed(a, b)
    html = (
        open_templates()
        .get_template(_TEMPLATE)
        .render(
            style=Markup(read_asset("style.css")),
            version=a.verdict.kvtriage_version,
            sides=sides,
            difference=difference,
            headline=_headline(a, b, difference),
            figures=figures,
            speed=speed,
            leads=[told.lead for told in sides[0].brief],
            terms=explain_terms(told.sentence.text for side in sides for told in side.brief),
        )
    )
    said = [(f"{side.letter}: {told.lead}", told.sentence) for side in sides for told in side.brief]
    return Report(html, encode_beside(said, figures, {"speed": speed}))


def _command(view: CaseView) -> str:
    return serve_command(view.verdict.vllm_args, view.verdict.server_env) if view.verdict.choice is not None else ""


def _headline(a: CaseView, b: CaseView, difference: Difference | None) -> str:
    same = a.verdict.choice == b.verdict.choice
    cause = "Nothing differs between the two" if difference is None else f"Only {difference.what} differs"
    if a.verdict.choice is None and b.verdict.choice is None:
        return f"{cause}, and neither case decides yet."
    if None in (a.verdict.choice, b.verdict.choice):
        return f"{cause}, and one of the two decides."
    return f"{cause}, and {'the choice is the same' if same else 'the choice is another'}."


def _draw_drift(a: CaseView, b: CaseView) -> Figure | Absent:
    """A panel for each metric, a group for each arm that both measured, a row for each case."""
    arms = [(arm, other) for arm in a.measured for other in b.measured if arm.name == other.name]
    paired = asked_alike(a, b)
    apart = other_kl(a, b)
    panels, rows = [], []
    for metric in METRICS[1:3] if apart else METRICS[:3]:
        groups = []
        for pair in arms:
            dots = tuple(_dots(metric, pair, (a, b)))
            if dots:
                groups.append(DotGroup(style_of(pair[0]).short, dots))
            rows.append(_row(metric, pair, (a, b), paired))
        if groups:
            form = axis_percent if metric.share else axis_number
            drawing = draw_dots(groups, label=f"{metric.title} in both cases", unit=metric.unit, tick_text=form)
            panels.append(Panel(metric.title, drawing))
    if not panels:
        return Absent(_QUESTION, "No arm was scored in both cases.")
    note = (
        "Both cases asked the same items, so the difference is taken item by item."
        if paired
        else "The cases asked other items, so no difference can be taken item by item: compare the intervals."
    )
    return Figure(
        question=_QUESTION,
        answer=apart or _answer(a, b, paired),
        note=f"Mean over all items of running text, with its interval; A is the filled mark, B the ring. {note}",
        panels=tuple(panels),
        table=Table.of(
            ("metric", "arm", "A", "A low", "A high", "B", "B low", "B high", "B − A", "low", "high"), rows, words=2
        ),
    )


def _dots(metric: Metric, arms: tuple[ArmRecord, ArmRecord], views: tuple[CaseView, CaseView]) -> Iterator[DotRow]:
    for letter, shape, arm, view in zip(_SIDES, ("circle", "ring"), arms, views, strict=True):
        drift = drift_of(view, metric, arm, None)
        if drift is not None:
            dot = to_row(view, drift)
            yield replace(dot, label=letter, style=replace(dot.style, shape=shape))


def _row(
    metric: Metric, arms: tuple[ArmRecord, ArmRecord], views: tuple[CaseView, CaseView], paired: bool
) -> tuple[Cell, ...]:
    found = [drift_of(view, metric, arm, None) for view, arm in zip(views, arms, strict=True)]
    change = _change(metric, arms[0].name, views) if paired else None
    spans = [None if drift is None else drift.interval for drift in found]
    return (metric.title, style_of(arms[0]).short, *(cell for span in (*spans, change) for cell in _cells(span)))


def _cells(span: Interval | None) -> tuple[Cell, Cell, Cell]:
    return (None, None, None) if span is None else (span.mean, span.low, span.high)


def _change(metric: Metric, arm: str, views: tuple[CaseView, CaseView]) -> Interval | None:
    """B less A over the items that both scored, as sure as the one that has to be surer by its rule and its look."""
    before, after = (_drift_by_item(metric, arm, view) for view in views)
    both = sorted(before.keys() & after.keys())
    confidence = max(view.pairs.look.confidence(view.plan.study.rule.confidence) for view in views)
    return paired_interval([after[item] - before[item] for item in both], confidence) if both else None


def _drift_by_item(metric: Metric, arm: str, view: CaseView) -> dict[Item, float]:
    """Of the items that the arm could score, and BF16 too where the metric is a difference from it."""
    name, reference, keeps = metric.measure.metric, metric.measure.reference, metric.measure.keeps(None)
    base = {} if reference is None else view.pairs.scores_of(reference)
    found = {}
    for item, trial in view.pairs.scores_of(arm).items():
        value = trial.metrics.get(name) if keeps(trial) else None
        native = base[item].metrics.get(name) if item in base else None
        if value is not None and (reference is None or native is not None):
            found[item] = value - (native or 0.0)
    return found


def _answer(a: CaseView, b: CaseView, paired: bool) -> str:
    """The chosen arm's KL, or the first candidate's."""
    arms = [
        arm for arm in a.measured if arm.role == "candidate" and any(arm.name == other.name for other in b.measured)
    ]
    arm = next((arm for arm in arms if a.is_chosen(arm) or b.is_chosen(arm)), arms[0] if arms else None)
    if arm is None:
        return "No candidate was scored in both cases."
    other = next(other for other in b.measured if other.name == arm.name)
    before, after = drift_of(a, METRICS[0], arm, None), drift_of(b, METRICS[0], other, None)
    if before is None or after is None:
        return "The chosen arm was not scored in both cases."
    short = style_of(arm).short
    if not paired:
        apart = before.interval.high < after.interval.low or after.interval.high < before.interval.low
        told = "lie apart" if apart else "overlap"
        return f"{short}: the intervals of its KL in A and B {told}."
    change = _change(METRICS[0], arm.name, (a, b))
    if change is None or not change.bounded or change.holds_zero:
        return f"{short}: no difference of KL can be told from these items."
    span = interval(change.low, change.high, signed)
    return f"{short}: KL changes by {signed(change.mean)} ({span}) from A to B, item by item."


def _speed(a: CaseView, b: CaseView) -> Table:
    """Price and speed against BF16 of the arms that both have."""
    rows = []
    for arm in a.products:
        other = next((one for one in b.products if one.name == arm.name), None)
        if other is None or arm.role == "baseline":
            continue
        told = [crossing_with_baseline(view, one) for view, one in ((a, arm), (b, other))]
        rows.append((style_of(arm).short, *("not timed" if found is None else found.in_words() for found in told)))
    return Table.of(("decoding against BF16", "A", "B"), rows, words=3)
