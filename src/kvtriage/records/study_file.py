"""Read study.toml: what tomllib made of the file becomes a Study and a Rule. Flags override it later.

An error names the key and says what to write instead.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping

import msgspec

from kvtriage.errors import StudyError
from kvtriage.records.rule import Rule
from kvtriage.records.spelling import did_you_mean
from kvtriage.records.study import Study

__all__ = ["read_rule", "read_study"]


def read_study(mapping: Mapping[str, object], base: Rule | None = None) -> Study:
    """The Study that study.toml asks for, given the file as tomllib read it.

    Keys stand at the top level or in a `[study]` table, the margins in a `[rule]` table; what
    is left out keeps its default, or that of the rule `base`. Raises StudyError for an unknown
    key, for one given twice and for a value of the wrong type. The values themselves are
    `validate_study`'s to judge.
    """
    outer = {key: value for key, value in mapping.items() if key not in ("study", "rule")}
    inner = _table(mapping, "study")
    twice = sorted(outer.keys() & inner.keys())
    if twice:
        raise StudyError(
            f"study.toml gives {twice[0]!r} twice, at the top and in the [study] table",
            hint="keep one of the two",
        )
    if "rule" in inner:
        raise StudyError("study.toml has a rule inside the [study] table", hint="write it as a [rule] table of its own")
    rule = read_rule(_table(mapping, "rule"), base, "study.toml", " in the [rule] table")
    return Study(**_fields(Study, {**outer, **inner}, "study.toml", ""), rule=rule)


def read_rule(table: Mapping[str, object], base: Rule | None, file: str, where: str = "") -> Rule:
    """The Rule of a `[rule]` table, or of a file that is one; what is left out is `base`'s, or the default.

    `file` and `where` name the place in errors. Raises StudyError as `read_study` does.
    """
    return msgspec.structs.replace(base or Rule(), **_fields(Rule, table, file, where))


def _table(mapping: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = mapping.get(name, {})
    if not isinstance(table, Mapping):
        raise StudyError(f"{name!r} in study.toml is not a table", hint=f"write a line [{name}] and its keys below it")
    return table


def _fields(struct: type[msgspec.Struct], table: Mapping[str, object], file: str, where: str) -> dict[str, typing.Any]:
    """The keys of `table`, each converted to the type that `struct` gives it."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct) if field.name != "rule"}
    values = {}
    for key, value in table.items():
        if key not in types:
            raise StudyError(f"{file} has an unknown key {key!r}{where}", hint=did_you_mean(key, types))
        try:
            values[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            raise StudyError(
                f"{key}{where} is of the wrong type: {str(error)[:1].lower()}{str(error)[1:]}",
                hint=f"its default is {key} = {_toml(msgspec.structs.asdict(struct())[key])}",
            ) from error
    return values


def _toml(value: object) -> str:
    match value:
        case str():
            return f'"{value}"'
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return str(value)
