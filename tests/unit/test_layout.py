"""The code in top-level folders is part of the one package tp_runtime, and only that."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

import tp_runtime.broadcast
import tp_runtime.launch
import tp_runtime.selection

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("broadcast", "selection", "launch")


@pytest.mark.parametrize("name", LINKED)
def test_the_link_leads_to_the_top_level_folder(name: str) -> None:
    link = ROOT / "tp_runtime" / name
    assert link.is_symlink()
    # relative, so that a clone anywhere works
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_importing_the_top_level_folder_is_refused(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=rf"import tp_runtime\.{name}, not {name}"):
        spec.loader.exec_module(module)


def test_the_linked_packages_are_found_through_the_links() -> None:
    for module in (tp_runtime.broadcast, tp_runtime.launch, tp_runtime.selection):
        assert module.__file__ is not None
        assert Path(module.__file__).parents[1].name == "tp_runtime"


def test_the_wheel_has_one_top_level_name_and_all_of_the_code() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = config["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": ["tp_runtime", "tp_runtime.*"]}
    # a folder without __init__.py, or below one, is left out of the wheel without a word
    folders = {
        folder
        for top in ("tp_runtime", *LINKED)
        for file in (ROOT / top).rglob("*.py")
        for folder in (file.parent, *file.parent.parents)
        if ROOT in folder.parents
    }
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "tp_runtime" / "py.typed").is_file()


def test_every_test_file_has_a_name_of_its_own() -> None:
    # pytest imports test files by their base name: two of one name cannot be collected together
    names = [path.name for path in (ROOT / "tests").glob("*/test_*.py")]
    assert len(names) == len(set(names))
