"""Rules of the house that a reader of the source can check."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvtriage"
MODULES = sorted(SOURCE.rglob("*.py"))
NO_ROOM = {"utils", "util", "helpers", "helper", "common", "core", "misc"}
GENERATED = {"build", "dist", "case", "case-demo", "node_modules", "site"}
HIDDEN_AND_SHIPPED = {".ci"}
FORBIDDEN = [f"/{folder}/" for folder in ("home", "root", "tmp", "work", "Users")]
FORBIDDEN += ["pypi" + ".org", "python" + "hosted", "npm" + "js"]

module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))


def names_bound(tree: ast.Module) -> Iterator[str]:
    """Names that the module's top level binds, imports included."""
    for node in ast.walk(ast.Module([*tree.body], [])):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)


def names_public(tree: ast.Module) -> set[str]:
    """Functions and classes that the module defines and does not call private."""
    defined = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {name for name in defined if not name.startswith("_")}


def exports(tree: ast.Module) -> list[str] | None:
    """The module's `__all__`; None when it has none."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    return None


@module
def test_all_names_what_the_module_offers(path: Path) -> None:
    tree = ast.parse(path.read_text())
    named = exports(tree)
    if named is None:
        assert all(isinstance(node, ast.Expr) for node in tree.body), "a module with code needs __all__"
        return
    assert named == sorted(named, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert len(named) == len(set(named))
    assert set(named) <= set(names_bound(tree)), "__all__ names what is not there"
    assert names_public(tree) <= set(named), "a public name is missing from __all__"


@module
def test_names_say_what_a_thing_is(path: Path) -> None:
    rooms = {*path.relative_to(SOURCE).with_suffix("").parts}
    functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    assert not (rooms | {name.strip("_") for name in functions}) & NO_ROOM


@module
def test_no_assert_no_pickle_no_remote_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: raise a class from kvtriage.errors"
        match node:
            case ast.Import(names=aliases):
                imported = {alias.name for alias in aliases}
            case ast.ImportFrom(module=str() as name):
                imported = {name}
            case _:
                imported = set()
        assert not imported & {"pickle", "marshal", "shelve", "dill", "joblib"}
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                raise AssertionError(f"line {node.lineno}: torch.load unpickles")
            case ast.Call(func=ast.Name(id="eval" | "exec")):
                raise AssertionError(f"line {node.lineno}: runs text as code")
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                raise AssertionError(f"line {node.lineno}: only --trust-remote-code may switch this on")


@pytest.mark.parametrize("path", sorted((SOURCE / "kvcache" / "readers").glob("*.py")), ids=lambda path: str(path.name))
def test_readers_never_guess_a_key(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id="getattr")):
                raise AssertionError(f"line {node.lineno}: a reader requires or derives, it does not guess")
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="config") | ast.Attribute(attr="config"),
                    attr="get",
                ),
                args=[_, _],
            ):
                raise AssertionError(f"line {node.lineno}: a default is derived and recorded, not slipped in")


def text_files(root: Path) -> Iterator[Path]:
    """What the repository ships, hidden files and `.ci` included: everything but caches and outputs."""
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in GENERATED and name != "__pycache__" and not name.endswith(".egg-info")
            if not name.startswith(".") or name in HIDDEN_AND_SHIPPED
        ]
        yield from (Path(folder) / name for name in files if not name.endswith((".png", ".safetensors", ".pyc")))


def forbidden_words(root: Path) -> list[str]:
    """'path: word' for each path of one machine, and each registry's address, in the text below `root`."""
    return [
        f"{path.relative_to(root)}: {word}"
        for path in text_files(root)
        for word in FORBIDDEN
        if word in path.read_text(errors="replace")
    ]


def test_the_text_speaks_of_itself_alone() -> None:
    assert forbidden_words(ROOT) == []


@pytest.mark.parametrize("word", FORBIDDEN)
@pytest.mark.parametrize("place", ["README.md", ".gitignore", ".ci/run", "docs/guide/page.md"])
def test_a_planted_word_is_found(tmp_path: Path, place: str, word: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(f"see {word}there")
    assert forbidden_words(tmp_path) == [f"{place}: {word}"]


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())}
    pages = {page.resolve() for page in index.parent.rglob("*.md")} - {index.resolve()}
    assert pages <= linked
