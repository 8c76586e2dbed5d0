"""Which blocks of the source each test runs, recorded once, and the tests to run for a mutant.

A recording is of one test file. It is made again when the file changes, or when asked for. It
outlives changes of the source: a block that it does not know counts as run by the tests that ran
its function, or else its file.
"""

import base64
import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from source_blocks import Block, SourceIndex

__all__ = ["RecordedTest", "Recordings", "find_test_files", "group_files", "split_by_time"]

_FOLDERS = ("processes", "conformance", "simulation", "integration", "seeds", "docs", "unit")
"""The folders of tests; the slowest come first, so that none is left for the end."""

_BATCHES = (10.0, 60.0)
"""Seconds after which pytest is started anew: most mutants are caught by the first tests."""


_FEW_FILES = 8
"""A name that more test files have says little about which test is meant."""


class RecordedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test that has passed.

    Attributes:
        id: of pytest.
        seconds: with its fixtures.
        ran: bit n says whether it has run block n of the source as it was.
        blocks: how many it ran that do not run at import; few make a test specific.
    """

    id: str
    seconds: float
    ran: int
    blocks: int


class _StoredTest(msgspec.Struct, frozen=True, array_like=True):
    id: str
    seconds: float
    passed: bool
    ran: bytes


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of a test file; the hashes are of the file and of the source."""

    file: str
    file_hash: str
    source_hash: str
    tests: list[_StoredTest]


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """The source that a recording is of: the key of each block; "" if it runs at import."""

    keys: list[str]

    def mask_functions(self) -> int:
        """Return the blocks that do not run at import."""
        return _to_mask(bool(key) for key in self.keys)

    def mask(self, blocks: Collection[Block]) -> int:
        """Return these blocks; for one that is not known, those of its function or its file."""
        mask = 0
        for block in blocks:
            for start in (block.key, f"{block.file}:{block.scope}:", f"{block.file}:"):
                is_whole = start == block.key
                found = _to_mask(
                    key == start if is_whole else key.startswith(start) for key in self.keys
                )
                if found:
                    mask |= found
                    break
        return mask


class Recordings:
    """Recordings in a folder.

    Args:
        folder: is created when something is saved.
        root: the repository.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = folder
        self._root = root
        self._hashes: dict[str, str] = {}
        self._stored: dict[str, _Stored] = {}
        for path in folder.glob("*.msgpack"):
            stored = msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
            if (root / stored.file).exists():
                self._stored[stored.file] = stored
        self._sources = {
            path.stem: msgspec.json.decode(path.read_bytes(), type=_Source)
            for path in folder.glob("*.json")
        }
        self._functions = {name: source.mask_functions() for name, source in self._sources.items()}
        self._tests: dict[str, list[RecordedTest]] = {}
        self._texts: dict[str, str] = {}

    def find_missing(self, files: Iterable[str]) -> list[str]:
        """Return the files that have no recording, or have changed since."""
        return [
            file
            for file, found in [(file, self._hash(file)) for file in files]
            if file not in self._stored or self._stored[file].file_hash != found
        ]

    def count_outdated(self, source: SourceIndex) -> int:
        """Count the recordings of another source than this one."""
        return sum(stored.source_hash != source.hash for stored in self._stored.values())

    def save(
        self, source: SourceIndex, files: Sequence[str], facts: Iterable[dict[str, Any]]
    ) -> None:
        """Save what a run of test files has reported."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if source.hash not in self._sources:
            keys = ["" if block.runs_at_import else block.key for block in source.blocks]
            self._sources[source.hash] = _Source(keys=keys)
            self._functions[source.hash] = self._sources[source.hash].mask_functions()
            (self._folder / f"{source.hash}.json").write_bytes(
                msgspec.json.encode(self._sources[source.hash])
            )
        found: defaultdict[str, list[_StoredTest]] = defaultdict(list)
        for fact in facts:
            ran = base64.b64decode(fact["ran"])
            test = _StoredTest(fact["test"], fact["seconds"], fact["passed"], ran)
            found[test.id.partition("::")[0]].append(test)
        for file in files:
            stored = _Stored(
                file=file,
                file_hash=self._hash(file),
                source_hash=source.hash,
                tests=found[file],
            )
            self._stored[file] = stored
            self._tests.pop(file, None)
            name = file.replace("/", "-").removesuffix(".py")
            (self._folder / f"{name}.msgpack").write_bytes(msgspec.msgpack.encode(stored))

    def choose(self, blocks: Collection[Block], names: Collection[str] = ()) -> list[RecordedTest]:
        """Return the tests that run one of the blocks, the quickest and most specific first.

        Before them come those of the files that have one of the names, if these are few. Of the
        tests of one function with several parameters, others come between.
        """
        masks = {name: source.mask(blocks) for name, source in self._sources.items()}
        named = self._find_files(names)
        found = [
            test
            for file, stored in self._stored.items()
            for test in self._load(file)
            if file in named or test.ran & masks[stored.source_hash]
        ]
        found.sort(key=_cost)
        ranks: defaultdict[str, int] = defaultdict(int)
        costs: dict[str, float] = {}
        for test in found:
            function = test.id.partition("[")[0]
            ranks[function] += 1
            costs[test.id] = _cost(test) * ranks[function]
        return sorted(
            found, key=lambda test: (test.id.partition("::")[0] not in named, costs[test.id])
        )

    def _find_files(self, names: Collection[str]) -> set[str]:
        """Return the test files that have one of the names, unless many have it."""
        found: set[str] = set()
        for name in names:
            word = re.compile(rf"\b{re.escape(name)}\b")
            files = {file for file in self._stored if word.search(self._read(file))}
            if len(files) <= _FEW_FILES:
                found |= files
        return found

    def _read(self, file: str) -> str:
        if file not in self._texts:
            self._texts[file] = (self._root / file).read_text(encoding="utf-8")
        return self._texts[file]

    def _load(self, file: str) -> list[RecordedTest]:
        if file not in self._tests:
            stored = self._stored[file]
            functions = self._functions[stored.source_hash]
            self._tests[file] = [_unpack(test, functions) for test in stored.tests if test.passed]
        return self._tests[file]

    def _hash(self, file: str) -> str:
        """Return the hash of a file as it was at first: a recording may take long.

        With it, that of the JSON files beside it that it names, such as saved seeds.
        """
        if file not in self._hashes:
            path = self._root / file
            content = path.read_bytes()
            data = [each for each in path.parent.glob("*.json") if each.name.encode() in content]
            content += b"".join(each.read_bytes() for each in sorted(data))
            self._hashes[file] = hashlib.sha256(content).hexdigest()[:16]
        return self._hashes[file]


def _unpack(test: _StoredTest, functions: int) -> RecordedTest:
    ran = int.from_bytes(zlib.decompress(test.ran), "little") & functions
    return RecordedTest(id=test.id, seconds=test.seconds, ran=ran, blocks=ran.bit_count())


def _cost(test: RecordedTest) -> float:
    return test.blocks * (0.2 + test.seconds)


def _to_mask(bits: Iterable[bool]) -> int:
    """Return a number whose bit n is the n-th of these."""
    return int("".join("1" if bit else "0" for bit in bits)[::-1], 2)


def find_test_files(tree: Path) -> list[str]:
    """Return the test files of a tree."""
    return [
        str(path.relative_to(tree))
        for folder in _FOLDERS
        for path in sorted((tree / "tests" / folder).rglob("test_*.py"))
    ]


def group_files(files: Iterable[str]) -> list[list[str]]:
    """Return the test files that are recorded together: unit tests are short."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        groups[str(Path(file).parent) if file.startswith("tests/unit/") else file].append(file)
    return list(groups.values())


def split_by_time(tests: Iterable[RecordedTest], limit: float) -> list[list[RecordedTest]]:
    """Return tests in batches that take longer and longer, until the time is used up."""
    batches: defaultdict[int, list[RecordedTest]] = defaultdict(list)
    seconds = 0.0
    for test in tests:
        seconds += test.seconds
        if seconds > limit and batches:
            break
        batches[sum(seconds > end for end in _BATCHES)].append(test)
    return list(batches.values())
