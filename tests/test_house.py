"""The house rules that lint cannot express: sizes, names, places, and where SQL may stand."""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = {
    "pyproject.toml",
    "controller",
    "agent",
    "sql",
    "alembic",
    "tests",
    "ops",
    "README.md",
    "LICENSE",
}
PACKAGES = ("sql", "agent", "controller")
FILE_LINES, FUNCTION_LINES, SQL_LINES, README_LINES = 500, 60, 250, 120
BANNED_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|misc)(_|$)")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b|NotImplemented" r"Error")
SQL_START = re.compile(
    r"\s*(select\s.+\sfrom\s|insert\s+into\s|update\s+\S+\s+set\s|delete\s+from\s|with\s+\w+\s+as\s*\("
    r"|create\s+(or\s+replace\s+|unique\s+)?(table|view|function|index|role|database|schema|trigger)\s"
    r"|drop\s+(table|view|function|index|role|database|schema)\s|alter\s+(table|role|database)\s"
    r"|grant\s.+\sto\s|select\s+[\w.]+\()",
    re.IGNORECASE | re.DOTALL,
)
SQL_IN_PYTHON = {"sql/migrate.py", "sql/logins.py", "sql/listen.py"}
"""Statements with names that cannot be arguments, and the LISTEN connection's own few words."""


@cache
def tracked() -> tuple[str, ...]:
    """Files that git has or would take; every file where there is no git (an unpacked release)."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = (
        done.stdout.splitlines()
        if done.returncode == 0
        else [
            str(p.relative_to(ROOT))
            for p in ROOT.rglob("*")
            if p.is_file() and not any(part in (".venv", "__pycache__", ".git") for part in p.parts)
        ]
    )
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


def files(suffix: str, *folders: str) -> list[str]:
    return [
        n for n in tracked() if n.endswith(suffix) and (not folders or n.split("/")[0] in folders)
    ]


def python_files() -> list[str]:
    scripts = [
        n for n in tracked() if n.startswith("ops/") and "." not in Path(n).name and _is_python(n)
    ]
    return files(".py") + scripts


def _is_python(name: str) -> bool:
    with (ROOT / name).open("rb") as file:
        return b"python" in file.readline(100)


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


def functions(name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        n for n in ast.walk(tree_of(name)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from ``def`` to its end, without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def too_long(suffix: str, most: int, names: list[str]) -> list[str]:
    counted = ((name, len(text_of(name).splitlines())) for name in names)
    return [f"{name}: {lines} lines" for name, lines in counted if lines > most]


def test_files_are_short() -> None:
    assert not too_long(".py", FILE_LINES, python_files())


def test_sql_files_are_short() -> None:
    names = [n for n in files(".sql", "sql") if "/migrations/" not in n]
    assert not too_long(".sql", SQL_LINES, names)


def test_readmes_are_short() -> None:
    assert not too_long(".md", README_LINES, [n for n in files("README.md") if n != "README.md"])


def test_functions_are_short() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}: {length(node)} lines"
        for name in python_files()
        for node in functions(name)
        if length(node) > FUNCTION_LINES
    ]
    assert not long


def test_every_module_says_what_it_is_for() -> None:
    silent = [n for n in python_files() if text_of(n).strip() and not ast.get_docstring(tree_of(n))]
    assert not silent


def test_public_names_of_packages_are_explained() -> None:
    """Classes and functions at module level; ten lines with a good name speak for themselves."""
    silent = [
        f"{name}:{node.lineno} {node.name}"
        for name in files(".py", *PACKAGES)
        for node in tree_of(name).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and (isinstance(node, ast.ClassDef) or length(node) > 10)
    ]
    assert not silent


def test_top_level_is_fixed() -> None:
    found = {name.split("/")[0] for name in tracked()}
    assert {name for name in found if not name.startswith(".")} <= TOP


def test_alembic_folder_is_no_package() -> None:
    """From the repository's root it would hide the installed alembic."""
    assert not (ROOT / "alembic" / "__init__.py").exists()


def test_nothing_is_left_unfinished() -> None:
    text_suffixes = (".py", ".sql", ".md", ".toml", ".yml", ".yaml", ".sh", ".txt", ".service")
    marks = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name in tracked()
        if name.endswith(text_suffixes) or name in {"ops/up", "ops/test", "ops/bootstrap"}
        if not name.startswith("tests/captures/")
        for number, line in enumerate(text_of(name).splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not marks


def test_nothing_is_called_a_helper() -> None:
    vague = [
        n
        for n in files(".py", *PACKAGES, "ops")
        if any(BANNED_NAMES.search(Path(part).stem) for part in n.split("/"))
    ]
    assert not vague


def _docstrings(tree: ast.Module) -> set[int]:
    """Identities of the string nodes that are docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def _sql_strings(name: str) -> list[int]:
    tree = tree_of(name)
    spared = _docstrings(tree)
    strings = (
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )
    return [n.lineno for n in strings if id(n) not in spared and SQL_START.match(n.value)]


def test_sql_stands_in_sql_files_only() -> None:
    names = [n for n in files(".py", *PACKAGES) if n not in SQL_IN_PYTHON]
    assert not [f"{name}:{line}" for name in names for line in _sql_strings(name)]


@pytest.mark.parametrize(
    "text",
    [
        "select id from llmgw.nodes",
        "insert into t values (1)",
        "update t set a = 1",
        "with a as (select 1) select * from a",
        "select agent.sync($1)",
    ],
)
def test_the_sql_rule_sees_statements(text: str) -> None:
    assert SQL_START.match(text)


@pytest.mark.parametrize("text", ["select one with --port", "update of the agent", "delete it"])
def test_the_sql_rule_lets_words_pass(text: str) -> None:
    assert not SQL_START.match(text)


LOCAL_CLOCK = re.compile(
    r"\btime\.(time|time_ns|localtime|gmtime|ctime|strftime|asctime)\b|CLOCK_REALTIME"
    r"|\bdate(time)?\.(now|utcnow|today)\(|\bfrom time import (?!monotonic$)",
    re.MULTILINE,
)
SHOWS_SKEW = {"agent/loop.py": 1, "agent/database_check.py": 1}
"""Where a process says what its own clock shows, for the database to compare."""
STAMPS_LINES = {"controller/router/access_line.py": 1}
"""Where a log line has a time although no database told one (static mode)."""


def test_F20_no_local_clock_is_read_but_to_show_how_far_off_it_is() -> None:
    found = {n: len(LOCAL_CLOCK.findall(text_of(n))) for n in files(".py", *PACKAGES)}
    assert {name: count for name, count in found.items() if count} == SHOWS_SKEW | STAMPS_LINES


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("at = time.time()", True),
        ("datetime.datetime.now(UTC)", True),
        ("time.clock_gettime(time.CLOCK_REALTIME)", True),
        ("from time import time", True),
        ("from time import monotonic", False),
        ("found = scores.now(pool)", False),
        ("began = time.monotonic()", False),
        ("trio.current_time()", False),
    ],
)
def test_F20_the_rule_tells_clocks_apart(text: str, seen: bool) -> None:
    assert bool(LOCAL_CLOCK.search(text)) is seen


SCOPES = {"open_nursery", "CancelScope", "fail_after", "fail_at", "move_on_after", "move_on_at"}


def own_nodes(function: ast.AST) -> list[ast.AST]:
    """Everything in a function's body that is not in a function within it."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found += [child, *own_nodes(child)]
    return found


def yields_in_scopes(tree: ast.Module) -> list[int]:
    """Lines that yield inside a nursery or cancel scope. A context manager's one yield may be:
    its block is a part of the caller's task, and ends where it began."""
    lines = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any("contextmanager" in ast.unparse(d) for d in function.decorator_list):
            continue
        for block in own_nodes(function):
            if isinstance(block, (ast.With, ast.AsyncWith)) and SCOPES & {
                getattr(n, "attr", getattr(n, "id", None))
                for item in block.items
                for n in ast.walk(item.context_expr)
            }:
                inside = own_nodes(block)
                lines += [n.lineno for n in inside if isinstance(n, (ast.Yield, ast.YieldFrom))]
    return lines


def test_H07_nobody_yields_inside_a_nursery_or_cancel_scope() -> None:
    names = [name for name in files(".py", *PACKAGES) if "yield" in text_of(name)]
    assert not [f"{name}:{line}" for name in names for line in yields_in_scopes(tree_of(name))]


def test_H07_the_router_answers_without_async_generators() -> None:
    """Nothing of an answer can be abandoned while it waits between two yields: there are none."""
    found = [
        f"{name}:{function.lineno}"
        for name in files(".py", "controller")
        if name.startswith("controller/router/")
        for function in functions(name)
        if isinstance(function, ast.AsyncFunctionDef)
        and any(isinstance(n, ast.Yield) for n in own_nodes(function))
        and not any("contextmanager" in ast.unparse(d) for d in function.decorator_list)
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("async def f():\n async with trio.open_nursery() as n:\n  yield 1", [3]),
        ("def f():\n with a, move_on_after(1):\n  if b:\n   yield from c", [4]),
        ("async def f():\n with trio.fail_after(1):\n  def g():\n   yield 1", []),
        ("@asynccontextmanager\nasync def f():\n with trio.CancelScope():\n  yield", []),
        ("async def f():\n with trio.fail_after(1):\n  await g()\n yield 1", []),
    ],
)
def test_H07_the_rule_sees_yields(text: str, seen: list[int]) -> None:
    assert yields_in_scopes(ast.parse(text)) == seen


def test_named_queries_say_why() -> None:
    """A name line, then a comment line, then the statement."""
    silent = []
    for name in files(".sql", "sql"):
        if "/queries/" in name:
            lines = text_of(name).splitlines()
            silent += [
                f"{name}:{i + 1}"
                for i, line in enumerate(lines)
                if line.startswith("-- name:") and not lines[i + 1].startswith("-- ")
            ]
    assert not silent


def test_console_scripts_start() -> None:
    scripts = tomllib.loads(text_of("pyproject.toml"))["project"]["scripts"]
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


def test_constraints_are_versions_only() -> None:
    lines = [
        line
        for line in text_of("ops/constraints.txt").splitlines()
        if line and not line.startswith("#")
    ]
    assert not [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)
    ]
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))


def test_every_dependency_is_constrained() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    wanted = project["dependencies"] + [
        d for extra in project["optional-dependencies"].values() for d in extra
    ]
    constrained = {
        re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()
        for line in text_of("ops/constraints.txt").splitlines()
    }
    names = {re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", d)[0]).lower() for d in wanted}
    assert names <= constrained


def test_what_is_not_compiled_is_named_as_it_is() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
    assert hook["include"] == ["controller/router/*.py"]
    router = ROOT / "controller" / "router"
    assert not [name for name in hook["exclude"] if not (router / name).exists()]


def acting_slices(tree: ast.Module) -> list[int]:
    """Lines where a bound of a slice is a call that may do something."""
    bounds = [node for node in ast.walk(tree) if isinstance(node, ast.Slice)]
    calls = [n.func for bound in bounds for n in ast.walk(bound) if isinstance(n, ast.Call)]
    return [
        func.lineno for func in calls
        if (func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)) not in HARMLESS
    ]  # fmt: skip


HARMLESS = {"len", "find", "start", "end"}


def test_nothing_happens_in_the_bounds_of_a_slice() -> None:
    """mypyc may evaluate them twice, and what was to be written once was."""
    names = [name for name in files(".py", "controller") if "/router/" in name]
    assert len(names) > 50
    assert not {name: found for name in names if (found := acting_slices(tree_of(name)))}
    assert acting_slices(ast.parse("view = view[write(fd, view) :]")) == [1]
    assert acting_slices(ast.parse("text[: found.end(1)] + text[len(a) + 1 :]")) == []


def made_again(tree: ast.Module) -> list[int]:
    """Lines where an `__init__` is called by name, and so perhaps of an object that had its own."""
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    named = [f for f in calls if isinstance(f, ast.Attribute) and f.attr == "__init__"]
    return [f.lineno for f in named if ast.unparse(f.value) != "super()"]


def test_no_object_is_made_again() -> None:
    """Compiled, the second `__init__` does not let go of what the first one set."""
    names = [name for name in files(".py", "controller") if "/router/" in name]
    assert not {name: found for name in names if (found := made_again(tree_of(name)))}
    assert made_again(ast.parse("super().__init__()\nBase.__init__(self)")) == [2]


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(
        int(Path(n).name[:4]) for n in files(".md", "ops") if n.startswith("ops/decisions/")
    )
    assert numbers == list(range(1, len(numbers) + 1))


def test_news_are_there() -> None:
    assert [
        n
        for n in tracked()
        if re.fullmatch(r"ops/news/\d+\.(feature|fix|change|removal)(\.\d+)?\.md", n)
    ]


def test_comments_name_no_person_or_machine() -> None:
    """Paths of a developer's machine do not belong into code."""
    private = re.compile(r"/(work|home/\w+|Users/\w+)/(main|shared|\w+)/")
    kinds = (tokenize.COMMENT, tokenize.STRING)
    found = []
    for name in python_files():
        tokens = tokenize.generate_tokens(io.StringIO(text_of(name)).readline)
        found += [
            f"{name}:{t.start[0]}" for t in tokens if t.type in kinds and private.search(t.string)
        ]
    assert not found
