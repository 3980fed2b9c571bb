"""Rules to decide by: two are shipped, any other is a file of the same form."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from kvtriage.errors import StudyError
from kvtriage.records.rule import Rule
from kvtriage.records.study_file import read_rule

__all__ = ["SHIPPED", "load_rule", "load_toml", "shipped_rule"]

SHIPPED = ("strict", "fanout")


def shipped_rule(name: str) -> Rule:
    """Raises StudyError for a name that is not shipped."""
    if name not in SHIPPED:
        raise StudyError(
            f"there is no rule {name!r}", hint=f"name one of {', '.join(SHIPPED)}, or a TOML file of yours"
        )
    text = resources.files("kvtriage.records").joinpath("rules", f"{name}.toml").read_text(encoding="utf-8")
    return read_rule(tomllib.loads(text), None, f"{name}.toml")


def load_rule(name_or_file: str) -> Rule:
    """A shipped rule by its name, or the rule in a TOML file. Raises StudyError.

    A file that gives no name goes by its own; keys may stand at the top or in a `[rule]` table.
    """
    if name_or_file in SHIPPED:
        return shipped_rule(name_or_file)
    file = Path(name_or_file)
    if file.suffix != ".toml" and not file.exists():
        return shipped_rule(name_or_file)
    table = load_toml(file)
    inner = table.get("rule", table)
    if not isinstance(inner, Mapping):
        raise StudyError(f"'rule' in {file} is not a table", hint="write a line [rule] and its keys below it")
    return read_rule({"name": file.stem, **inner}, None, str(file))


def load_toml(file: Path) -> dict[str, object]:
    """What tomllib makes of a file of settings. Raises StudyError."""
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise StudyError(f"cannot read {file}: {error.strerror}", hint="name a TOML file that exists") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{file} is not TOML: {error}", hint="mend the place it names") from error
