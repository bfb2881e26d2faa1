"""Where code could be wrong: each site is a small wrong change of whole lines of a file. They are drawn by seed."""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|WHERE|JOIN|AND|POLICY)\b")
_SQL_AND = re.compile(
    r"\bAND (?:[^()\"',;]|\([^()]*\))+?(?=\)| AND | OR | ORDER | GROUP | LIMIT | RETURNING |[\"';]|$)", re.MULTILINE
)
_SQL_COMPARISON = re.compile(r"\b(?:WHERE|AND|OR|ON|WHEN) [\w.]+ (=|<>|<=?|>=?|@>|IS NOT NULL|IS NULL)(?=[ )\"]|$)", re.MULTILINE)
_SQL_FLIPPED = {"=": "<>", "<>": "=", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "@>": "<@"}
_SQL_FLIPPED |= {"IS NULL": "IS NOT NULL", "IS NOT NULL": "IS NULL"}


class Mutant(NamedTuple):
    """Lines of a file, as they are and as they would be wrong. They stand in the file once; `line` is where they stood."""

    file: str
    line: int
    original: str
    mutated: str
    equivalent: str = ""
    """Why no test can notice it."""


class Change(NamedTuple):
    kind: str
    begin: int
    end: int
    replacement: str


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._offsets = [0]
        for line in self._lines:
            self._offsets.append(self._offsets[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def _at(self, line: int, column: int) -> int:
        return self._offsets[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def between(self, left: ast.expr, right: ast.expr, word: str) -> tuple[int, int]:
        """Return where an operator stands between its operands, whose parentheses and comments may be there, too."""
        begin = self.span(left)[1]
        match = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)" if word[0].isalpha() else re.escape(word)).search(self.text, begin)
        assert match
        assert match.end() <= self.span(right)[0]
        return match.span()


def _changes(source: _Source, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if "TYPE_CHECKING" not in ast.dump(test):
            begin, end = source.span(test)
            yield Change("condition", begin, end, f"not ({source.text[begin:end]})")
        case ast.BoolOp(op=op, values=[left, right, *_]):
            word, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield Change("condition", *source.between(left, right, word), other)
        case ast.Compare(left=left, ops=[op, *_], comparators=[right, *_]) if "__name__" not in ast.dump(left):
            word, other = _COMPARISONS[type(op)]
            yield Change("comparison", *source.between(left, right, word), other)
        case ast.Constant(value=bool(value)):
            yield Change("constant", *source.span(node), str(not value))
        case ast.Constant(value=int(value) | float(value)):
            yield Change("constant", *source.span(node), repr(value + 1))
        case ast.Expr(value=ast.Await()):
            yield Change("await", *source.span(node), "pass")
        case ast.Try(finalbody=[first, *_] as body):
            yield Change("finally", source.span(first)[0], source.span(body[-1])[1], "pass")
        case ast.JoinedStr() | ast.Constant(value=str()):
            begin, end = source.span(node)
            if _SQL.search(source.text, begin, end):
                yield from _sql(source.text, begin, end)
        case _:
            pass


def _sql(text: str, begin: int, end: int) -> Iterator[Change]:
    for match in _SQL_AND.finditer(text, begin, end):
        yield Change("sql", *match.span(), "")
    for match in _SQL_COMPARISON.finditer(text, begin, end):
        yield Change("sql", *match.span(1), _SQL_FLIPPED[match[1]])


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walk in the order of the text, but not into f-strings, where Python 3.11 does not tell positions."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _sites(path: Path) -> Iterator[tuple[str, Mutant]]:
    """Find a file's sites and their kinds; those whose lines stand there twice are left out."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        source = _Source(text)
        changes = [change for node in _walk(ast.parse(text)) for change in _changes(source, node)]
    else:
        changes = list(_sql(text, 0, len(text)))
    for change in changes:
        begin = text.rfind("\n", 0, change.begin) + 1
        end = text.find("\n", change.end)
        original = text[begin:end]
        mutated = text[begin : change.begin] + change.replacement + text[change.end : end]
        mutant = Mutant(str(path.relative_to(ROOT)), text.count("\n", 0, begin) + 1, original, mutated.rstrip())
        if place(mutant, text) is not None:
            yield change.kind, mutant


def place(mutant: Mutant, text: str) -> int | None:
    """Return where the lines of a mutant begin in its file, unless they stand there twice or no longer."""
    places = [match.start() for match in re.finditer(f"^{re.escape(mutant.original)}$", text, re.MULTILINE)]
    return places[0] if len(places) == 1 else None


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw mutants: as many of each package as its part of the lines, of kinds that are equally likely."""
    lines: dict[str, int] = defaultdict(int)
    sites: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "app").rglob("*.*")):
        if path.suffix in {".py", ".sql"}:
            package = path.relative_to(ROOT / "app").parts[0]
            lines[package] += path.read_text(encoding="utf-8").count("\n")
            for kind, mutant in _sites(path):
                sites[package][kind].append(mutant)
    shares = {package: count * lines[package] / sum(lines.values()) for package in sites}
    numbers = {package: int(share) for package, share in shares.items()}
    for package in sorted(shares, key=lambda package: numbers[package] - shares[package])[: count - sum(numbers.values())]:
        numbers[package] += 1
    chance = random.Random(seed)  # noqa: S311 - it must be repeatable
    drawn = []
    for package, kinds in sites.items():
        for _ in range(numbers[package]):
            kind = chance.choice([kind for kind in sorted(kinds) if kinds[kind]])
            drawn.append(kinds[kind].pop(chance.randrange(len(kinds[kind]))))
    return sorted(drawn)
