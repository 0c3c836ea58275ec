"""Records of applied passes, kept on the graph module itself."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any, NamedTuple

from torch import fx

from graphopt import _compat
from graphopt.ir.operators import is_operator, row
from graphopt.manager.literals import literal
from graphopt.readable.columns import aligned, readable_bytes

META_KEY = "graphopt_passes"
"""The key in `gm.meta` of the list of records."""


class Counts(NamedTuple):
    """Node counts of a graph: all, collective launches, `copy_`."""

    nodes: int
    collectives: int
    copies: int


@dataclass
class PassRecord:
    """The record of one application of a pass to a graph.

    Attributes:
        name: of the pass.
        arguments: the value of each option, defaults included; a node is given by its name.
        nodes_before, nodes_after: number of nodes.
        collectives_before, collectives_after: number of launched collectives.
        copies_before, copies_after: number of `aten.copy_`.
        peak_bytes_before, peak_bytes_after: the most bytes of values that the step holds at once,
            its inputs left out, by the simulator's account; 0 for a stage other than lower.
        seconds: for the pass, and for cleaning up after it; without verification and dumps.
        changes: how many changes the pass says it made, None if it does not say.
        changed: whether the graph is another than before.
        changes_numerics: whether the pass is one that may change the bits of the results.
        skipped: it was disabled, and did not run.
        stage: it is no pass but another stage of the list, such as capture or finalize.
        difference: what it changed, as unified text; empty for a stage.
        note: why nothing was done, or less than a reader would expect; empty where nothing is said.
        launches: stands for all launches of collectives that it has left, in order: what has to be
            the same on all ranks.

    >>> import graphopt
    >>> graphopt.PassRecord("my_pass", changes=2, changed=True).outcome
    '2 changes'
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    collectives_before: int = 0
    collectives_after: int = 0
    copies_before: int = 0
    copies_after: int = 0
    peak_bytes_before: int = 0
    peak_bytes_after: int = 0
    seconds: float = 0.0
    changes: int | None = None
    changed: bool = False
    changes_numerics: bool = False
    skipped: bool = False
    stage: bool = False
    note: str = ""
    launches: str = field(default="", repr=False, compare=False)
    _difference: object = field(default="", init=False, repr=False, compare=False)

    @property
    def difference(self) -> str:
        """The change of the graph, as text."""
        return str(self._difference)

    @difference.setter
    def difference(self, text: object) -> None:
        """Accepts a text, or a function that gives one when it is read."""
        self._difference = text

    def __getstate__(self) -> dict[str, Any]:
        """Replaces the difference by its text, since nodes belong to their graph."""
        state = {**vars(self), "difference": self.difference}
        state.pop("_difference", None)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def before(self) -> Counts:
        """The node counts before the pass."""
        return Counts(self.nodes_before, self.collectives_before, self.copies_before)

    @before.setter
    def before(self, counts: Counts) -> None:
        """Sets the node counts before the pass."""
        self.nodes_before, self.collectives_before, self.copies_before = counts

    @property
    def after(self) -> Counts:
        """The node counts after the pass."""
        return Counts(self.nodes_after, self.collectives_after, self.copies_after)

    @after.setter
    def after(self, counts: Counts) -> None:
        """Sets the node counts after the pass."""
        self.nodes_after, self.collectives_after, self.copies_after = counts

    def __str__(self) -> str:
        options = ", ".join(f"{name}={literal(value)}" for name, value in self.arguments.items())
        head = f"{self.name}({options})" if options else self.name
        if self.skipped:
            return f"{head}: skipped"
        counts = ", ".join(
            f"{what} {old}" if old == new else f"{what} {old} -> {new}"
            for what, old, new in zip(Counts._fields, self.before, self.after, strict=True)
        )
        if self.peak_bytes_before != self.peak_bytes_after:
            peaks = self.peak_bytes_before, self.peak_bytes_after
            counts += ", peak {} -> {}".format(*map(readable_bytes, peaks))
        numerics = "; may change numerics" if self.changes_numerics else ""
        note = "".join(f"\n  note: {line}" for line in self.note.splitlines())
        return f"{head}: {self.outcome} in {self.seconds:.3f} s; {counts}{numerics}{note}"

    def _repr_html_(self) -> str:
        return Report([self])._repr_html_()

    @property
    def outcome(self) -> str:
        """The number of changes, in words."""
        if not self.changed:
            return "no change"
        if self.changes is None:
            return "changed"
        return f"{self.changes} change{'s' * (self.changes != 1)}"


class Report(list[PassRecord]):
    """A list of records, first to last, printed as a table (HTML in notebooks).

    >>> from graphopt.manager import records_of
    >>> _ = graphopt.PassManager("schedule_comm_wait").run(gm)
    >>> "<table>" in graphopt.manager.Report(records_of(gm))._repr_html_()
    True
    """

    def __str__(self) -> str:
        head, *texts = aligned([_COLUMNS, *map(_columns, self)])
        lines = [head]
        for text, record in zip(texts, self, strict=True):
            lines.append(text)
            for note in record.note.splitlines():
                wrapped = textwrap.wrap(note, 76, break_long_words=False, break_on_hyphens=False)
                lines += [f"    {line}" for line in wrapped]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(text)}</th>" for text in [*_HEADS, "options", "note"])
        rows = ([*_values(record), _options(record), record.note] for record in self)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_COLUMNS = ["pass", "changes", "ms", "nodes", "launches", "peak MiB"]
_HEADS = ["pass", "outcome", "ms", *Counts._fields, "peak MiB"]


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _options(record: PassRecord) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in record.arguments.items())


def _columns(record: PassRecord) -> list[str]:
    """Returns a pass's cells in the table of 80 columns."""
    name, _, milliseconds, nodes, collectives, _, peak = _values(record, "→")
    changes = "some" if record.changes is None else str(record.changes)
    changes = "skipped" if record.skipped else changes if record.changed else "none"
    return [name, changes, milliseconds, nodes, collectives, peak]


def _values(record: PassRecord, arrow: str = " → ") -> list[str]:
    """Returns a pass's cells in a table without options and note."""
    peaks = [f"{n / 2**20:.1f}" for n in (record.peak_bytes_before, record.peak_bytes_after)]
    counts = zip(map(str, record.before), map(str, record.after), strict=True)
    values = [old if old == new else f"{old}{arrow}{new}" for old, new in [*counts, tuple(peaks)]]
    if not record.peak_bytes_after:
        values[-1] = ""
    outcome = "skipped" if record.skipped else record.outcome
    return [record.name, outcome, f"{1e3 * record.seconds:.1f}", *values]


def applied_passes(gm: fx.GraphModule) -> list[str]:
    """Returns the names of the passes applied to a graph module, first to last.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = captured.graph_module
    >>> records = graphopt.PassManager("schedule_comm_wait").run(gm)
    >>> graphopt.applied_passes(gm)
    ['schedule_comm_wait']
    """
    return [record.name for record in records_of(gm) if not record.stage]


def records_of(gm: fx.GraphModule) -> Report:
    """Returns the records of all stages a graph module went through, passes included, first to
    last.

    >>> from graphopt.manager import records_of
    >>> _ = graphopt.PassManager("schedule_comm_wait").run(gm)
    >>> [record.name for record in records_of(gm)]
    ['schedule_comm_wait']
    """
    return Report(_as_record(record) for record in gm.meta.get(META_KEY, ()))


def _as_record(record: Any) -> PassRecord:
    """Converts a loaded graph's record, which may lack or add attributes."""
    if isinstance(record, PassRecord):
        return record
    known = {entry.name for entry in fields(PassRecord) if entry.init}
    found = PassRecord(**{name: v for name, v in vars(record).items() if name in known})
    found.difference = record.difference
    return found


def add_record(gm: fx.GraphModule, record: PassRecord) -> None:
    """Appends a record to a graph module."""
    # A new dictionary, because a copy of a graph module shares `meta` with it.
    gm.meta = {**gm.meta, META_KEY: [*records_of(gm), record]}


def count(graph: fx.Graph) -> Counts:
    """Counts the nodes of a graph."""
    collectives = copies = 0
    for target, nodes in _compat.calls_by_target(graph):
        collectives += row(target).collective * len(nodes)
        copies += is_operator(target, "aten::copy_") * len(nodes)
    return Counts(len(graph.nodes), collectives, copies)


def recorded_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as a record holds them: without references into the graph."""
    return fx.node.map_arg(dict(options), lambda node: node.name)
