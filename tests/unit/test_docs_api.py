"""docs/api.md: its snippets run, and the names that it uses exist."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest

import tp_runtime
from tests.docs import API, MEASURES, ONE, ONE_OR_TWO, TWO, Snippet, prose, snippets

PUBLIC = {
    name: getattr(module, name)
    for module in map(
        importlib.import_module,
        ("tp_runtime.errors", "tp_runtime.broadcast", "tp_runtime.selection", "tp_runtime"),
    )
    for name in getattr(module, "__all__", vars(module))
    if inspect.isclass(getattr(module, name))
}
TABLES = re.findall(r"^<!-- table of (\w+) -->\n((?:\|.*\n)+)", API.read_text(), re.MULTILINE)


def has(owner: Any, name: str) -> bool:
    """Whether instances of a class have this attribute, those that __init__ sets included."""
    if hasattr(owner, name):
        return True
    if dataclasses.is_dataclass(owner) and name in {f.name for f in dataclasses.fields(owner)}:
        return True
    return f"self.{name} = " in inspect.getsource(owner)


def members(owner: Any) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def listed_in(table: str) -> dict[str, str | None]:
    """Names in the first column, with the parameters where there are parentheses."""
    column = "\n".join(line.split("|")[1] for line in table.splitlines()[2:])
    return {
        name: parameters[1:-1] if parameters else None
        for name, parameters in re.findall(r"`(\w+)(\([^`]*\))?`", column)
    }


def test_every_snippet_says_where_it_runs() -> None:
    assert {snippet.ranks for snippet in snippets()} == {ONE, ONE_OR_TWO, TWO, MEASURES}


@pytest.mark.parametrize(
    "snippet", snippets(ONE, ONE_OR_TWO), ids=lambda snippet: f"line{snippet.line}"
)
def test_snippets_run(snippet: Snippet) -> None:
    printed = snippet.run()
    if "Engine(" in snippet.code:
        assert printed, "it was to print tokens"
    if "worker.launch" in snippet.code:
        assert printed == "[4, 4, 4, 4, 4]\n"
    if "engine.abort" in snippet.code:
        assert "0 length 8" in printed
        assert "1 abort" in printed


def test_dotted_names_exist() -> None:
    checked = 0
    for owner, name in re.findall(r"`([A-Z]\w+)\.([a-z]\w*)[^`]*`", prose()):
        assert owner in PUBLIC, f"`{owner}.{name}`: no public class {owner}"
        assert has(PUBLIC[owner], name), f"`{owner}.{name}`"
        checked += 1
    assert checked > 10


def test_class_names_exist() -> None:
    from tp_runtime.device_times import DeviceTimes
    from tp_runtime.step_times import StepTimes

    known = {*PUBLIC, DeviceTimes.__name__, StepTimes.__name__}  # the two are results only
    builtin = {"None", "True", "False", "ValueError"}
    named = set(re.findall(r"`([A-Z][a-z]\w+)[`(]", prose())) - builtin
    assert named <= known, named - known
    assert set(tp_runtime.__all__) <= set(re.findall(r"\w+", API.read_text()))


@pytest.mark.parametrize(("owner", "table"), TABLES, ids=[owner for owner, _ in TABLES])
def test_tables_list_everything(owner: str, table: str) -> None:
    cls = PUBLIC[owner]
    listed = listed_in(table)
    assert listed.keys() == members(cls)
    for name, parameters in listed.items():
        member = inspect.getattr_static(cls, name)
        assert inspect.isfunction(member) == (parameters is not None), name
        if parameters is not None:
            expected = list(inspect.signature(member).parameters.values())[1:]
            bare = inspect.Signature(
                [p.replace(annotation=inspect.Parameter.empty) for p in expected]
            )
            assert f"({parameters})" == str(bare), name


def test_sampling_defaults() -> None:
    (table,) = [table for owner, table in TABLES if owner == "SamplingParams"]
    defaults = {f.name: f.default for f in dataclasses.fields(tp_runtime.SamplingParams)}
    for row in table.splitlines()[2:]:
        names, values = (cell.strip() for cell in row.split("|")[1:3])
        fields = re.findall(r"`(\w+)`", names)
        if values:
            assert values == ", ".join(str(defaults[name]) for name in fields)


@pytest.mark.parametrize("field", ["runner", "channel", "group", "scheduler", "pages"])
def test_statistics_exist(field: str) -> None:
    from tp_runtime.broadcast import BroadcasterStatistics, PeerStatistics
    from tp_runtime.group import GroupStatistics
    from tp_runtime.pages import PagePoolStatistics
    from tp_runtime.scheduler import SchedulerStatistics
    from tp_runtime.step_runner import RunnerStatistics

    of = {
        "runner": (RunnerStatistics,),
        "channel": (BroadcasterStatistics, PeerStatistics),
        "group": (GroupStatistics,),
        "scheduler": (SchedulerStatistics,),
        "pages": (PagePoolStatistics,),
    }[field]
    (table,) = [table for owner, table in TABLES if owner == "EngineStatistics"]
    (row,) = [row for row in table.splitlines() if row.startswith(f"| `{field}` |")]
    named = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert named
    assert named <= set().union(*map(members, of))


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", prose())
    assert links
    for link in links:
        assert (API.parent / link).exists(), link
