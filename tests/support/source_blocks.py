"""The source as blocks: statements that run one after the other unless one of them raises.

`mark_blocks` changes a module so that each block sets a byte of memory that all processes of a
test share. No tracing is involved, so tests take as long as ever, and a process that is killed
has left its bytes. Line numbers and the files themselves stay as they are.

`SourceIndex.find` returns the blocks in which a mutant shows. Code that runs at import runs in
every test, so for a constant these are the blocks that use its name, and for an SQL statement
those that use the statement.
"""

import ast
import difflib
import hashlib
import marshal
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType

import msgspec
from source_mutants import SourceMutant

from jobsync.stores.sql import _BLOCK

__all__ = ["Block", "SourceIndex", "find_changed_lines", "mark_blocks"]

_UNCHECKED_HASH = (1).to_bytes(4, "little")
"""The flag of bytecode that is current whatever the source says (PEP 552)."""

_NO_CODE = re.compile(r"[\s)\]}]*(#.*)?")
"""A line that is blank, or has only a comment or the end of brackets."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of one list, up to and with one that has statements of its own.

    Attributes:
        file: the source file, from the root of the repository.
        scope: the function or class, with those around it: `Worker.run`.
        number: counts the blocks of the scope.
        first: the first line.
        last: the last line; blocks inside have a part of the lines.
        runs_at_import: not inside a function.
    """

    file: str
    scope: str
    number: int
    first: int
    last: int
    runs_at_import: bool

    @property
    def key(self) -> str:
        """Return what identifies the block; most edits elsewhere in the file leave it."""
        return f"{self.file}:{self.scope}:{self.number}"


class _Marker:
    """Finds the blocks of a module, and puts a statement before each that says that it ran."""

    def __init__(self, file: str, base: int) -> None:
        self._file = file
        self._base = base
        self._counts: defaultdict[str, int] = defaultdict(int)
        self.blocks: list[Block] = []

    def mark(self, body: list[ast.stmt], scope: str = "", *, runs_at_import: bool = True) -> None:
        """Mark the blocks of a list of statements, in place."""
        start = _count_leading(body)
        marked, run = body[:start], list[ast.stmt]()
        for statement in body[start:]:
            run.append(statement)
            inner = list(_find_lists(statement))
            if inner or statement is body[-1]:
                marked += [self._add_block(run, scope, runs_at_import=runs_at_import), *run]
                run = []
            is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
            for each in inner:
                self.mark(
                    each,
                    _join(scope, statement),
                    runs_at_import=runs_at_import and not is_function,
                )
        body[:] = marked

    def _add_block(self, run: list[ast.stmt], scope: str, *, runs_at_import: bool) -> ast.stmt:
        place = self._base + len(self.blocks)
        self.blocks.append(
            Block(
                file=self._file,
                scope=scope,
                number=self._counts[scope],
                first=_get_first_line(run[0]),
                last=run[-1].end_lineno or run[-1].lineno,
                runs_at_import=runs_at_import,
            )
        )
        self._counts[scope] += 1
        (statement,) = ast.parse(f"__ran__[{place}] = 1").body
        for node in ast.walk(statement):
            ast.copy_location(node, run[0])
        return statement


def mark_blocks(module: ast.Module, file: str, base: int = 0) -> list[Block]:
    """Make each block of a module set `ran_blocks.ran[base + number] = 1`; return the blocks."""
    marker = _Marker(file, base)
    marker.mark(module.body)
    start = _count_leading(module.body)
    module.body[start:start] = ast.parse("from ran_blocks import ran as __ran__").body
    return marker.blocks


def _count_leading(body: list[ast.stmt]) -> int:
    """Count the statements before which none may stand: a docstring and `from __future__`."""
    count = 0
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_text and count == 0) and not is_future:
            break
        count += 1
    return count


def _find_lists(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements directly inside a statement."""
    for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for field in ("body", "orelse", "finalbody"):
            if found := getattr(part, field, None):
                yield found


def _join(scope: str, statement: ast.stmt) -> str:
    if not isinstance(statement, _DEFINITIONS):
        return scope
    return f"{scope}.{statement.name}" if scope else statement.name


def _get_first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min(statement.lineno, *(each.lineno for each in decorators), statement.lineno)


def _write_bytecode(path: Path, code: CodeType) -> None:
    """Make Python import this code instead of the file's own, which stays."""
    target = Path(cache_from_source(str(path)))
    target.parent.mkdir(exist_ok=True)
    header = MAGIC_NUMBER + _UNCHECKED_HASH + source_hash(path.read_bytes())
    target.write_bytes(header + marshal.dumps(code))


def find_changed_lines(old: str, new: str) -> set[int]:
    """Return the numbers of old lines that changed, and those around lines that were added."""
    before, after = old.splitlines(), new.splitlines()
    changed: set[int] = set()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, _, _ in matcher.get_opcodes():
        if kind == "insert":
            changed |= {max(start, 1), min(start + 1, len(before))}
        elif kind != "equal":
            changed |= set(range(start + 1, end + 1))
    return changed


def _find_code(source: str, lines: set[int]) -> set[int]:
    """Return those of some lines that have code; else the next line that has some."""
    texts = enumerate(source.splitlines(), start=1)
    code = [line for line, text in texts if not _NO_CODE.fullmatch(text)]
    # A comment that became code stands before some.
    return lines & {*code} or {*[line for line in code if line > min(lines)][:1]}


class _Module(msgspec.Struct, frozen=True, kw_only=True):
    """A module: its blocks, and the statements that run at import with their lines."""

    blocks: list[Block]
    at_import: list[tuple[int, int, ast.stmt]]


class SourceIndex:
    """The blocks of all modules, and where names are used.

    Args:
        root: the repository.
        folder: of the modules.

    Attributes:
        blocks: in the order of their bytes.
        hash: of all source files.
    """

    def __init__(self, root: Path, folder: str = "src") -> None:
        self._root = root
        self._modules: dict[str, _Module] = {}
        self._uses: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._texts: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self.blocks: list[Block] = []
        digest = hashlib.sha256()
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".py", ".sql"}:
                continue
            source = path.read_text(encoding="utf-8")
            digest.update(f"{path.relative_to(root)}\0{source}\0".encode())
            if path.suffix == ".py":
                self._add(str(path.relative_to(root)), source)
        self.hash = digest.hexdigest()[:16]

    def _add(self, file: str, source: str) -> None:
        tree = ast.parse(source)
        at_import = [
            (_get_first_line(each), each.end_lineno or each.lineno, each)
            for each in _walk_import(tree.body)
        ]
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)):
                    self._uses[word].add((file, node.lineno))
                case ast.Constant(value=str(word)):
                    self._texts[word].add((file, node.lineno))
        blocks = mark_blocks(tree, file)
        self._modules[file] = _Module(blocks=blocks, at_import=at_import)
        self.blocks += blocks

    def write_instrumented(self, copy: Path) -> None:
        """Make the modules of a copy record the blocks that run."""
        base = 0
        for file, module in self._modules.items():
            path = copy / file
            tree = ast.parse(path.read_text(encoding="utf-8"))
            mark_blocks(tree, file, base)
            _write_bytecode(path, compile(tree, str(path), "exec", dont_inherit=True))
            base += len(module.blocks)

    def find(self, mutant: SourceMutant) -> set[Block]:
        """Return the blocks in which a mutant shows. None of them runs at import."""
        source = (self._root / mutant.file).read_text(encoding="utf-8")
        lines = find_changed_lines(source, mutant.mutate(source))
        if mutant.file.endswith(".sql"):
            return self._find_of_sql(mutant.file, source, lines)
        shown = _find_code(source, lines)
        found = {block for line in shown for block in self._find_of_line(mutant.file, line)}
        return found or self._get_functions(mutant.file)

    def find_names(self, mutant: SourceMutant) -> set[str]:
        """Return the constants and classes that a mutant defines in another way.

        A test may look at them and run none of the code that uses them.
        """
        if mutant.file.endswith(".sql"):
            return set()
        source = (self._root / mutant.file).read_text(encoding="utf-8")
        names: set[str] = set()
        for line in _find_code(source, find_changed_lines(source, mutant.mutate(source))):
            block = self._find_innermost(mutant.file, line)
            if block is not None and block.runs_at_import:
                inside = block.scope.rpartition(".")[2]
                names |= {inside} if inside else {*self._get_defined(mutant.file, line)}
        return names

    def _get_defined(self, file: str, line: int) -> Iterator[str]:
        """Yield the names that a statement of a module sets."""
        statement = self._find_statement(file, line)[2]
        if isinstance(statement, _DEFINITIONS):
            yield statement.name
        yield from _get_names(statement)

    def _find_statement(self, file: str, line: int) -> tuple[int, int, ast.stmt]:
        """Return the innermost statement that runs at import and has a line, with its lines."""
        around = [each for each in self._modules[file].at_import if each[0] <= line <= each[1]]
        return min(around, key=lambda each: each[1] - each[0], default=(0, 0, ast.Pass()))

    def _get_functions(self, file: str) -> set[Block]:
        """Return the blocks of a module that do not run at import."""
        return {block for block in self._modules[file].blocks if not block.runs_at_import}

    def _find_of_line(self, file: str, line: int) -> set[Block]:
        block = self._find_innermost(file, line)
        if block is not None and not block.runs_at_import:
            return {block}
        return self._follow([(file, line)])

    def _find_innermost(self, file: str, line: int) -> Block | None:
        around = [each for each in self._modules[file].blocks if each.first <= line <= each.last]
        return min(around, key=lambda each: each.last - each.first, default=None)

    def _follow(self, places: Iterable[tuple[str, int]]) -> set[Block]:
        """Return the blocks that use what these lines define, directly or by other constants."""
        found: set[Block] = set()
        followed: set[str] = set()
        waiting = list(places)
        while waiting:
            file, line = waiting.pop()
            block = self._find_innermost(file, line)
            if block is not None and not block.runs_at_import:
                found.add(block)
                continue
            first, last, statement = self._find_statement(file, line)
            if isinstance(statement, _DEFINITIONS):
                functions = self._get_functions(file)
                found |= {each for each in functions if first <= each.first and each.last <= last}
            for name in set(_get_names(statement)) - followed:
                followed.add(name)
                waiting += self._uses[name]
        return found

    def _find_of_sql(self, file: str, source: str, lines: set[int]) -> set[Block]:
        """Return the blocks that use a statement which has one of the lines."""
        names: set[str] = set()
        for block in _BLOCK.finditer(source):
            first = source.count("\n", 0, block.start()) + 1
            last = source.count("\n", 0, block.end()) + 1
            # Fragments come before their users.
            if lines & {*range(first, last)} or any(
                f"{{{each}}}" in block["text"] for each in names
            ):
                names.add(block["name"])
        folder = str(Path(file).parent)
        places = {place for name in names for place in self._texts[name]}
        found = self._follow(place for place in places if place[0].startswith(folder))
        if not found:
            loaded = {place[0] for place in self._texts[Path(file).name]}
            found = {block for each in loaded for block in self._get_functions(each)}
        return found


def _walk_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements that run at import; of a function that is its header."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for each in _find_lists(statement):
                yield from _walk_import(each)


def _get_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that an assignment sets."""
    match statement:
        case ast.Assign(targets=targets):
            nodes = [node for target in targets for node in ast.walk(target)]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            nodes = [*ast.walk(target)]
        case _:
            nodes = []
    for node in nodes:
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word):
                yield word
