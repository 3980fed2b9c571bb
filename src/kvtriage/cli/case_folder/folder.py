"""An open case: its records, and its lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtriage.cli.case_folder.chain import check_chain, check_version, damaged
from kvtriage.cli.case_folder.difference import difference_of
from kvtriage.cli.case_folder.journal import open_journal, read_lines
from kvtriage.cli.case_folder.layout import (
    ANSWERS,
    IMPORTS,
    KINDS,
    PROBES,
    REPORT,
    REPORT_NUMBERS,
    SEARCH,
    TRIALS,
    Kind,
)
from kvtriage.cli.case_folder.plain_files import digest_of, is_there, read_plain
from kvtriage.errors import CaseError
from kvtriage.files import write_atomic
from kvtriage.records.answers import Answer
from kvtriage.records.evidence import Evidence
from kvtriage.records.frontier import Frontier, SearchTrial
from kvtriage.records.imported import Imported
from kvtriage.records.plan import Plan
from kvtriage.records.probes import ProbeLine
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.trials import Trial
from kvtriage.records.verdict import Verdict

__all__ = ["CaseFolder"]

_Record = TypeVar("_Record", Plan, ScaleRecord, Sensitivities, Frontier, Evidence, Verdict)


class CaseFolder:
    """An open case. Made by `open_case`, which holds the lock around it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, record: type[_Record]) -> _Record | None:
        """The record, or None when it is not there yet.

        Raises CaseError when it is of another version, is damaged, or when a file that it was
        made from has changed since.
        """
        kind = KINDS[record]
        data = read_plain(self.path / kind.file)
        if data is None:
            return None
        check_version(kind.file, data)
        try:
            loaded = msgspec.json.decode(data, type=record)
        except msgspec.DecodeError as error:
            raise damaged(kind.file, str(error)) from error
        check_chain(self.path, kind, loaded.inputs)
        return loaded

    def need(self, record: type[_Record]) -> _Record:
        """`load`, for a verb that cannot go on without it. Raises CaseError."""
        loaded = self.load(record)
        if loaded is None:
            kind = KINDS[record]
            raise CaseError(f"{self.path} has no {kind.file} yet", hint=f"run 'kvtriage {kind.verb} {self.path}' first")
        return loaded

    def text(self, record: type[_Record]) -> str:
        """The record's file as it stands. Raises CaseError when it is not there yet."""
        self.need(record)
        return (self.path / KINDS[record].file).read_text(encoding="utf-8")

    def inputs_for(self, record: type[_Record]) -> dict[str, str]:
        """File names and SHA-256 of what this record is made from, as they stand now.

        Lines that a verb has yet to write are left out, and so is a frontier that nobody searched for.
        """
        kind: Kind = KINDS[record]
        names = (*kind.made_from, *kind.made_with)
        digests = {name: digest_of(self.path / name) for name in names}
        return {name: digest for name, digest in digests.items() if digest is not None}

    def save(self, record: _Record) -> None:
        """Write a new record, whole or not at all.

        Raises CaseError when it is there already or its inputs have moved on, and StorageError.
        """
        kind = KINDS[type(record)]
        if is_there(self.path / kind.file):
            raise CaseError(
                f"{kind.file} is already there, and no verb edits an earlier record", hint="start a new case folder"
            )
        check_chain(self.path, kind, record.inputs)
        encoded = msgspec.json.format(msgspec.json.encode(record), indent=2)
        write_atomic(self.path / kind.file, encoded + b"\n")

    def adopt_plan(self, plan: Plan) -> Plan:
        """Begin the case with `plan`, or go on with an equal one that is there already.

        Raises CaseError, naming what differs, for a case of another model, data set or study.
        """
        there = self.load(Plan)
        if there is None:
            self.save(plan)
            return plan
        difference = difference_of(there, plan)
        if difference is not None:
            raise CaseError(
                f"{self.path} is a case of {difference}",
                hint="choose another --out, or ask again for what the case was begun with",
            )
        return there

    def trials(self) -> tuple[Trial, ...]:
        """All whole lines of trials.jsonl. A torn last line, left by a kill, is cut off.

        Raises CaseError with the line number for any other damage.
        """
        return tuple(read_lines(self.path / TRIALS, msgspec.json.Decoder[Trial](Trial)))

    def probed(self) -> tuple[ProbeLine, ...]:
        """All whole lines of probes.jsonl, as `trials` reads its own."""
        return tuple(read_lines(self.path / PROBES, msgspec.json.Decoder(ProbeLine)))

    def searched(self) -> tuple[SearchTrial, ...]:
        """All whole lines of search.jsonl, as `trials` reads its own."""
        return tuple(read_lines(self.path / SEARCH, msgspec.json.Decoder(SearchTrial)))

    def imports(self) -> tuple[Imported, ...]:
        """All whole lines of imports.jsonl, as `trials` reads its own."""
        return tuple(read_lines(self.path / IMPORTS, msgspec.json.Decoder(Imported)))

    def answers(self) -> tuple[Answer, ...]:
        """All whole lines of answers.jsonl, as `trials` reads its own. One that is damaged may be taken out."""
        way_out = f"remove that line of {self.path / ANSWERS}: what it answered is asked again, and nothing else"
        return tuple(read_lines(self.path / ANSWERS, msgspec.json.Decoder[Answer](Answer), way_out))

    @contextlib.contextmanager
    def appending(self, name: str = TRIALS) -> Iterator[Callable[[Trial | SearchTrial | ProbeLine | Answer], None]]:
        """A sink that appends a line to `name`, and returns when it is safe on the disk.

        The sink raises StorageError when the disk is full; the file keeps its whole lines.
        """
        with open_journal(self.path / name) as append:
            yield lambda line: append(msgspec.json.encode(line))

    def add_imports(self, imports: Sequence[Imported]) -> None:
        """Append to imports.jsonl, all lines or none.

        Raises CaseError where the verdict was read without them, StorageError.
        """
        if is_there(self.path / KINDS[Verdict].file):
            raise CaseError(
                f"{self.path} has a verdict already, read without these results",
                hint="remove its verdict.json, import, and run 'kvtriage decide': the same records are read again",
            )
        with open_journal(self.path / IMPORTS) as append:
            append(b"\n".join(map(msgspec.json.encode, imports)))

    def write_report(self, html: str, beside: bytes) -> Path:
        """report.json, then the report.html that it belongs to, drawn anew. Raises CaseError, StorageError."""
        file, numbers = self.path / REPORT, self.path / REPORT_NUMBERS
        is_there(file)
        is_there(numbers)
        write_atomic(numbers, beside)
        write_atomic(file, html.encode())
        return file
