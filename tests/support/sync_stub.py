"""The types of `jobsync.sync`, written from the classes that its own are derived from.

python tests/support/sync_stub.py      rewrites src/jobsync/sync.pyi (make api)
"""

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jobsync
from jobsync import sync
from jobsync.queue.task_calls import TaskDecorator

__all__ = ["STUB", "build_stub", "list_faces"]

STUB = Path(jobsync.__file__).with_name("sync.pyi")

_HEAD = "# Written by `make api` from the classes of `jobsync`; compared by test_sync.py.\n"

_ATTRIBUTES = {
    "ClaimedMessage": ("id: str", "data: RecordT", "attempt: int", "max_attempts: int"),
    "Database": (
        "resources: Registry[Resource]",
        "plugins: Registry[Any]",
        "events: Events",
        "works: bool",
    ),
    "Plugin": ("name: str", "namespace: str", "events: Events"),
    "QueuePlugin": ("settings: QueueSettings", "resource: str"),
    "QueueTask": ("function: Callable[Q, C]",),
    "Resource": ("name: str", "events: Events"),
    "TaskCall": ("name: str", "queue: QueuePlugin[Any]"),
    "TaskHandle": ("id: str",),
}
"""What objects have besides methods and properties."""

_ATTRIBUTE_IMPORTS = (
    "import jobsync",
    "import builtins",
    "from collections.abc import Callable",
    "from typing import Any, Generic, Protocol, Self, TypeVar",
    "from types import TracebackType",
    "from jobsync.database.document import Document",
    "from jobsync.database.registry import Registry",
    "from jobsync.events import Events",
    "from jobsync.queue.settings import QueueSettings",
)

_LIFECYCLE = """
    def connect(self) -> Self: ...
    def disconnect(self, *, within: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
"""

_SPECIAL = {"__init__", "__aiter__", "__call__"}
"""What is shown although its name begins with an underscore."""

_RENAMED = {
    "AsyncGenerator": "Iterator",
    "AsyncIterator": "Iterator",
    "PluginT": "_PluginT",
    "asynccontextmanager": "contextmanager",
}


def list_faces() -> dict[str, type]:
    """Return the derived classes by name."""
    faces = {name: getattr(sync, name) for name in sync.__all__}
    return {name: face for name, face in faces.items() if isinstance(face, type)}


def build_stub() -> str:
    """Return the text of the stub."""
    text = _write()
    for words in (["check", "--fix-only"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--quiet", "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _write() -> str:
    writer = _Writer({*list_faces(), "TaskDecorator"})
    classes = [
        writer.write_class(name, face._kind)  # type: ignore[attr-defined]
        for name, face in list_faces().items()
        if face.__name__ == name
    ]
    # What makes tasks returns those that block.
    classes.append(writer.write_class("TaskDecorator", TaskDecorator))
    (producer,) = ast.parse(inspect.getsource(inspect.unwrap(sync.producer))).body
    assert isinstance(producer, ast.FunctionDef)
    module = sys.modules[inspect.unwrap(sync.producer).__module__]
    function = writer.write_function(producer, module)
    imports = sorted({*writer.imports, *_ATTRIBUTE_IMPORTS})
    names = ", ".join(f'"{name}"' for name in sync.__all__)
    # Plugins of either kind are accepted.
    plugin = '_PluginT = TypeVar("_PluginT", bound=Plugin | jobsync.Plugin)'
    parts = [_HEAD, *imports, f"__all__ = [{names}]", plugin, *classes, function]
    text = "\n".join([*parts, "S3QueuePlugin = QueuePlugin", ""])
    return text.replace("Sequence[Plugin]", "Sequence[Plugin | jobsync.Plugin]")


class _Writer:
    """Writes classes, and remembers what they import."""

    def __init__(self, faces: set[str]) -> None:
        self._faces = faces
        self.imports: set[str] = set()

    def write_class(self, name: str, kind: type) -> str:
        """Return the class for callers that block."""
        derived = next((base.__name__ for base in kind.__mro__[1:] if _is_face(base)), "")
        parameters = [each.__name__ for each in getattr(kind, "__parameters__", ())]
        for each in parameters:
            self._import(each, sys.modules[kind.__module__])
        subscript = f"[{', '.join(parameters)}]" if parameters else ""
        bases = [self._name_base(kind, derived)] if derived else []
        bases += ["Protocol"] if getattr(kind, "_is_protocol", False) else []
        bases += [f"Generic{subscript}"] if subscript else []
        lines = [f"class {name}({', '.join(bases)}):" if bases else f"class {name}:"]
        lines += [f"    wrapped: jobsync.{name}{subscript}"] if name in sync.__all__ else []
        lines += [f"    {attribute}" for attribute in _ATTRIBUTES.get(name, ())]
        skipped = {"connect", "disconnect"} if name == "Database" else set()
        seen: set[str] = set()
        inherited = {base for face in kind.__mro__[1:] if _is_face(face) for base in face.__mro__}
        for base in kind.__mro__:
            if base.__module__.startswith("jobsync") and base not in inherited:
                for function in _list_functions(base):
                    if function.name not in seen | skipped:
                        module = sys.modules[base.__module__]
                        text = self.write_function(function, module)
                        lines.append("    " + text.replace("\n", "\n    "))
                seen |= {function.name for function in _list_functions(base)}
        if name == "Database":
            lines.append(_LIFECYCLE)
        text = "\n".join([*lines, "    ..."])
        # In a class with a verb of this name, the type has to be named in full.
        return text.replace("list[", "builtins.list[") if "def list(" in text else text

    def _name_base(self, kind: type, derived: str) -> str:
        """Return a base class, with what its type parameters are."""
        for base in getattr(kind, "__orig_bases__", ()):
            if getattr(base, "__origin__", base).__name__ == derived and hasattr(base, "__args__"):
                return f"{derived}[{', '.join(each.__name__ for each in base.__args__)}]"
        return derived

    def write_function(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, module: ModuleType
    ) -> str:
        """Return a function without its body, which blocks instead of being awaited."""
        arguments, returns = function.args, function.returns
        for default in (arguments.defaults, arguments.kw_defaults):
            default[:] = [None if value is None else ast.Constant(...) for value in default]  # type: ignore[misc]
        name = "__iter__" if function.name == "__aiter__" else function.name
        body: list[ast.stmt] = [ast.Expr(ast.Constant(...))]
        # One with arguments, such as `refuse_unknown("Job")`, says nothing of the types.
        decorators = [item for item in function.decorator_list if not isinstance(item, ast.Call)]
        plain = ast.FunctionDef(name, arguments, body, decorators, returns, lineno=0)
        renamed = _Renamer().visit(plain)
        for node in ast.walk(renamed):
            if isinstance(node, ast.Name):
                self._import(node.id, module)
        return ast.unparse(ast.fix_missing_locations(renamed))

    def _import(self, name: str, module: ModuleType) -> None:
        if name in self._faces or name in _RENAMED.values():
            if name in _RENAMED.values() and name != "_PluginT":
                source = "contextlib" if name == "contextmanager" else "collections.abc"
                self.imports.add(f"from {source} import {name}")
            return
        for statement in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if name not in {alias.asname or alias.name for alias in statement.names}:
                    continue
                module_name = getattr(statement, "module", None)
                self.imports.add(
                    f"from {module_name} import {name}" if module_name else f"import {name}"
                )
                return
        if name in vars(module):
            self.imports.add(f"from {module.__name__} import {name}")


class _Renamer(ast.NodeTransformer):
    """Replaces what is awaited by what blocks, and texts in annotations by what they mean."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(_RENAMED.get(node.id, node.id), node.ctx)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return self.visit(ast.parse(node.value, mode="eval").body)  # type: ignore[no-any-return]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) == "Literal":
            return node
        return self.generic_visit(node)


def _is_face(kind: type) -> bool:
    return kind.__name__ in sync.__all__ and kind.__module__.startswith("jobsync")


def _list_functions(kind: type) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public functions of a class, without abstract ones, and those of overloads."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    functions = [
        item for item in tree.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    overloaded = {item.name for item in functions if _has_decorator(item, "overload")}
    for item in functions:
        is_public = not item.name.startswith("_") or item.name in _SPECIAL
        is_shown = item.name not in overloaded or _has_decorator(item, "overload")
        if is_public and is_shown and not _has_decorator(item, "abstractmethod"):
            yield item


def _has_decorator(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(ast.unparse(item) == name for item in function.decorator_list)


if __name__ == "__main__":
    STUB.write_text(build_stub(), encoding="utf-8")
