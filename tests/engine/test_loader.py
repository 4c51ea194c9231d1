"""Finding an engine class by its reference, and fitting options to its constructor."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import msgspec
import pytest

from outboard import EngineCore, EngineCoreRequest, OutputBatch
from outboard.engine.loader import bind_options, engine_options, engine_reference, load_engine_class
from outboard.engines.echo import EchoEngine
from outboard.errors import ConfigError, EngineNotFoundError, EngineOptionError

SOURCE = """
from outboard import EngineCore

class Base(EngineCore):
    def add_request(self, request): pass
    def abort_requests(self, request_ids): pass
    def has_work(self): return False
    def step(self, outputs): pass

class One(Base):
    class Inner(Base):
        pass

class Two(Base): pass

class Abstract(EngineCore):
    def step(self, outputs): pass

class NoEngine: pass

def function(): pass
"""

numbers = itertools.count()


class Engine(EngineCore):
    """An engine that does nothing."""

    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: Sequence[str]) -> None: ...
    def has_work(self) -> bool:
        return False

    def step(self, outputs: OutputBatch) -> None: ...


Write = Callable[..., str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module that can be imported; gives its name, which no other test has."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(source: str = SOURCE, name: str | None = None) -> str:
        name = name or f"engine_of_test_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def script(module: Write, tmp_path: Path) -> Write:
    """The same, by its path."""
    return lambda *args, **kwargs: str(tmp_path / f"{module(*args, **kwargs)}.py")


# --- references ------------------------------------------------------------------------------------------------------


def test_module_and_class() -> None:
    assert load_engine_class("outboard.engines.echo:EchoEngine") is EchoEngine


def test_a_class_in_a_class(module: Write) -> None:
    assert load_engine_class(f"{module()}:One.Inner").__qualname__ == "One.Inner"


def test_path_and_class(script: Write) -> None:
    path = script()
    cls = load_engine_class(f"{path}:Two")
    assert issubclass(cls, EngineCore)
    assert cls.__name__ == "Two"
    assert cls.__module__ != "__main__"


def test_a_relative_path(script: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(script())
    monkeypatch.chdir(path.parent)
    first = load_engine_class(f"./{path.name}:One")
    assert first.__name__ == "One"
    assert load_engine_class(f"{path.name}:One") is first  # one file is one module


def test_a_path_with_a_colon_in_it(tmp_path: Path, script: Write) -> None:
    (tmp_path / "a:b").mkdir()
    path = tmp_path / "a:b" / "engine.py"
    path.write_text(SOURCE)
    assert load_engine_class(f"{path}:One").__name__ == "One"


def test_a_file_is_loaded_once(script: Write) -> None:
    path = script()
    assert load_engine_class(f"{path}:One") is load_engine_class(f"{path}:One")
    assert load_engine_class(f"{path}:Two").__module__ == load_engine_class(f"{path}:One").__module__


def test_files_of_one_name_in_two_directories(tmp_path: Path, module: Write) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.py").write_text(SOURCE + f"\nclass Of{name.title()}(Base): pass\n")
    assert load_engine_class(f"{tmp_path}/first/engine.py:OfFirst").__name__ == "OfFirst"
    assert load_engine_class(f"{tmp_path}/second/engine.py:OfSecond").__name__ == "OfSecond"


def test_the_main_part_of_a_script_does_not_run(script: Write) -> None:
    path = script(SOURCE + "\nif __name__ == '__main__':\n    raise SystemExit('ran')\n")
    assert load_engine_class(f"{path}:One").__name__ == "One"


@pytest.mark.parametrize(
    ("name", "says"),
    [("Three", "does not exist"), ("NoEngine", "no subclass"), ("function", "no subclass"), ("One.Nope", "not exist")],
)
def test_a_wrong_name_is_answered_with_those_there_are(module: Write, script: Write, name: str, says: str) -> None:
    for target in (module(), script()):
        with pytest.raises(EngineNotFoundError, match=rf"{says}.*engines there: Base, One, Two$"):
            load_engine_class(f"{target}:{name}")


def test_a_module_with_no_engine() -> None:
    with pytest.raises(EngineNotFoundError, match="engines there: none"):
        load_engine_class("json:JSONDecoder")


def test_an_abstract_engine_names_what_it_lacks(module: Write) -> None:
    with pytest.raises(EngineNotFoundError, match=r"does not define abort_requests, add_request, has_work$"):
        load_engine_class(f"{module()}:Abstract")


@pytest.mark.parametrize("target", ["no_such_module", "outboard.no_such_module", "no_such_package.inner"])
def test_a_module_that_is_not_there(target: str) -> None:
    with pytest.raises(EngineNotFoundError, match=r"no module named 'no_such|no module named 'outboard.no_such"):
        load_engine_class(f"{target}:Engine")


def test_a_module_inside_one_that_is_no_package(module: Write) -> None:
    with pytest.raises(EngineNotFoundError, match="no module named"):
        load_engine_class(f"{module()}.inner:Engine")


@pytest.mark.parametrize("reference", ["Engine", ":Engine", "./my_engine:Engine", "..engine:Engine"])
def test_what_is_no_reference(reference: str) -> None:
    with pytest.raises(EngineNotFoundError):
        load_engine_class(reference)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "directory.py").mkdir()
    for name in ("nothing.py", "directory.py"):
        with pytest.raises(EngineNotFoundError, match=f"no file {tmp_path}/{name}"):
            load_engine_class(f"{tmp_path}/{name}:Engine")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_dependency", ModuleNotFoundError),
        ("from json import no_such_name", ImportError),
        ("1 / 0", ZeroDivisionError),
        ("def", SyntaxError),
        ("raise KeyboardInterrupt", KeyboardInterrupt),
    ],
)
def test_what_a_module_raises_passes_through(
    module: Write, script: Write, source: str, error: type[BaseException]
) -> None:
    for target in (module(source), script(source)):
        for _ in range(2):  # a file that failed is not taken for loaded
            with pytest.raises(error) as caught:
                load_engine_class(f"{target}:Engine")
            assert not isinstance(caught.value, EngineNotFoundError)


def test_a_missing_dependency_inside_the_same_package_passes_through(tmp_path: Path, module: Write) -> None:
    package = f"package_of_test_{next(numbers)}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "engine.py").write_text(f"import {package}.no_such_part\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        load_engine_class(f"{package}.engine:Engine")


# --- classes to references -------------------------------------------------------------------------------------------


def test_a_class_of_a_module() -> None:
    assert engine_reference(EchoEngine) == "outboard.engines.echo:EchoEngine"
    assert load_engine_class(engine_reference(EchoEngine)) is EchoEngine


@pytest.mark.parametrize("thing", [int, object(), "outboard", EchoEngine(), None])
def test_what_is_no_engine_class(thing: Any) -> None:
    with pytest.raises(EngineNotFoundError, match=r"subclass of outboard\.EngineCore"):
        engine_reference(thing)


def test_a_local_class_cannot_travel() -> None:
    class Local(Engine):
        pass

    with pytest.raises(EngineNotFoundError, match="Local is made inside a function: define it at the top of a module"):
        engine_reference(Local)


def test_a_class_in_a_class_has_a_reference(module: Write) -> None:
    reference = f"{module()}:One.Inner"
    assert engine_reference(load_engine_class(reference)) == reference


def test_a_class_that_was_loaded_from_a_file_has_a_reference(script: Write) -> None:
    """Another process must be able to load what the reference names."""
    path = script()
    reference = engine_reference(load_engine_class(f"{path}:One"))
    code = f"from outboard.engine.loader import load_engine_class; load_engine_class({reference!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd="/")


def in_main(*args: str, cwd: Path | None = None, stdin: str | None = None) -> str:
    command = [sys.executable, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30, cwd=cwd, input=stdin).stdout


PRINT_REFERENCE = """
from outboard.engine.loader import engine_reference
try:
    print(engine_reference(One))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_class_of_a_script_travels_by_its_path(script: Write) -> None:
    path = Path(script(SOURCE + PRINT_REFERENCE))
    assert in_main(path.name, cwd=path.parent).strip() == f"{path.resolve()}:One"


def test_a_class_of_a_module_that_runs_as_main(module: Write, tmp_path: Path) -> None:
    name = module(SOURCE + PRINT_REFERENCE)
    assert in_main("-m", name, cwd=tmp_path).strip() == f"{name}:One"


def test_a_class_of_a_package_that_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(SOURCE + PRINT_REFERENCE)
    assert in_main("-m", "package", cwd=tmp_path).strip() == "package.__main__:One"


@pytest.mark.parametrize("args", [["-c", SOURCE + PRINT_REFERENCE], ["-"]], ids=["-c", "stdin"])
def test_a_class_that_no_file_holds(args: list[str]) -> None:
    said = in_main(*args, stdin=SOURCE + PRINT_REFERENCE)
    assert said.startswith("EngineNotFoundError One has no file to import it from")


# --- options ---------------------------------------------------------------------------------------------------------


class Struct(msgspec.Struct):
    x: int


class Options(Engine):
    def __init__(
        self,
        model: str,
        size: int = 8,
        share: float = 0.5,
        fast: bool = False,
        limit: int | None = None,
        old: Optional[int] = None,  # noqa: UP045 - engines are written so, too
        kind: Literal["a", "b"] = "a",
        names: list[str] | None = None,
        sizes: tuple[int, ...] = (),
        table: dict[str, int] | None = None,
        struct: Struct | None = None,
        either: int | str = 0,
        *,
        keyword: int = 0,
        anything: Any = None,
        untyped=None,  # type: ignore[no-untyped-def]
    ) -> None: ...


class AnyOption(Engine):
    def __init__(self, known: int = 1, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("model", "m", "m"),
        ("model", "8", "8"),
        ("size", "8", 8),
        ("size", 8, 8),
        ("share", "0.25", 0.25),
        ("share", "1e-3", 0.001),
        ("share", 1, 1.0),
        ("fast", "true", True),
        ("fast", "false", False),
        ("fast", "1", True),
        ("fast", "0", False),
        ("fast", True, True),
        ("limit", "5", 5),
        ("limit", "null", None),
        ("limit", None, None),
        ("old", "5", 5),
        ("old", None, None),
        ("kind", "b", "b"),
        ("names", ["x"], ["x"]),
        ("sizes", ["1", 2], (1, 2)),
        ("table", {"x": "1"}, {"x": 1}),
        ("struct", {"x": "1"}, Struct(1)),
        ("either", "x", "x"),
        ("keyword", "1", 1),
        ("anything", "1", "1"),
        ("untyped", "1", "1"),
    ],
)
def test_a_value_is_converted_to_its_annotation(name: str, value: Any, bound: Any) -> None:
    result = bind_options(Options, {"model": "m", name: value})[name]
    assert result == bound
    assert type(result) is type(bound)


def test_defaults_are_left_to_the_constructor() -> None:
    assert bind_options(Options, {"model": "m"}) == {"model": "m"}
    assert bind_options(Engine, {}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 5),
        ("model", None),
        ("size", "many"),
        ("size", "8.5"),
        ("size", 8.5),
        ("size", None),
        ("share", "half"),
        ("fast", "maybe"),
        ("fast", 2),
        ("limit", "none at all"),
        ("kind", "c"),
        ("names", "x"),
        ("names", [1]),
        ("sizes", [1, "x"]),
        ("table", []),
        ("struct", {}),
    ],
)
def test_a_wrong_type_names_option_value_and_all_options(name: str, value: Any) -> None:
    with pytest.raises(EngineOptionError) as caught:
        bind_options(Options, {"model": "m", name: value})
    text = str(caught.value)
    assert f"option {name!r} cannot be {value!r}: " in text
    assert "options of Options: model: str; size: int = 8; share: float = 0.5" in text
    assert isinstance(caught.value, ConfigError)


def test_a_missing_option() -> None:
    with pytest.raises(EngineOptionError, match=r"option 'model' is missing; options of Options: model: str; size"):
        bind_options(Options, {"size": 1})


def test_unknown_options_are_all_named() -> None:
    with pytest.raises(EngineOptionError, match=r"unknown option 'modell', 'sise'; options of Options: model: str;"):
        bind_options(Options, {"sise": 1, "modell": "m"})
    with pytest.raises(EngineOptionError, match=r"unknown option 'x'; options of Engine: none$"):
        bind_options(Engine, {"x": 1})


def test_an_engine_that_takes_any_keyword() -> None:
    assert engine_options(AnyOption) is None
    given = {"known": "1", "other": [1]}
    assert bind_options(AnyOption, given) == given
    assert bind_options(AnyOption, given) is not given


def test_a_path_option_takes_text() -> None:
    """Options are msgpack values, so no other way leads to a Path."""

    class WithPath(Engine):
        def __init__(self, model: Path, cache: Path | None = None) -> None: ...

    bound = bind_options(WithPath, {"model": "/m"})
    assert Path(bound["model"]) == Path("/m")


def test_a_type_that_msgspec_does_not_know_is_left_to_the_constructor() -> None:
    class Custom:
        pass

    class WithCustom(Engine):
        def __init__(self, custom: object = None) -> None: ...

    WithCustom.__init__.__annotations__["custom"] = Custom
    assert bind_options(WithCustom, {"custom": "text"}) == {"custom": "text"}


def test_annotations_that_cannot_be_resolved() -> None:
    class Unresolved(Engine):
        def __init__(self, size: NoSuchName = 1) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert bind_options(Unresolved, {"size": "2"}) == {"size": "2"}


def test_options_are_listed_in_order_with_types_and_defaults() -> None:
    options = engine_options(Options)
    assert options is not None
    assert [option.name for option in options][:4] == ["model", "size", "share", "fast"]
    assert options[-1].name == "untyped"
    assert (options[0].default, options[1].default) == (msgspec.NODEFAULT, 8)
    assert [str(option) for option in options[:2]] == ["model: str", "size: int = 8"]
    assert str(options[-1]) == "untyped = None"
