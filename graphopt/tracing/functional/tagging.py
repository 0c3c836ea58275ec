"""Tags of traced nodes: phase, the user's source line, module path and provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import fx, nn

from graphopt import _compat
from graphopt.ir.inplace import CALLABLE
from graphopt.ir.metadata import MODULES, SOURCE, set_phase, set_provenance, set_sent_names
from graphopt.ir.user_frames import current_modules, current_user_line
from graphopt.tracing.exactness.recurrent import recorded
from graphopt.tracing.interception.replaced_functions import assigned


class Tagger:
    """Tags nodes as they are created while a step runs under the tracer.

    A backward node gets line and module path of the forward node it belongs to: autograd numbers
    its nodes, and both sides are known by that number.

    Attributes:
        phase: phase of the nodes created now; None leaves it to autograd's state.
        sends: names of what the collectives created now send.
        rewritten: what makes of new nodes those that the function of torch which runs has in eager
            code.
    """

    def __init__(self, module_names: dict[nn.Module, str]) -> None:
        self.phase: str | None = None
        self.sends: tuple[str, ...] = ()
        self.rewritten: Callable[[fx.Node], None] | None = None
        self._names = module_names
        self._forward: dict[int, dict[str, Any]] = {}

    def during(self, phase: str) -> AbstractContextManager[None]:
        """A context in which created nodes belong to a phase."""
        return assigned(self, phase=phase)

    def sending(self, *names: str) -> AbstractContextManager[None]:
        """A context in which created nodes belong to the communication of the named parameters or
        buffers."""
        return assigned(self, phase="communication", sends=names)

    def tag(self, node: fx.Node) -> None:
        """Records the origin of a new node."""
        if self.rewritten is not None:
            self.rewritten(node)
        set_provenance(node, ("capture",))
        if self.sends:
            set_sent_names(node, self.sends)
        backward = _compat.backward_sequence_number()
        if backward is not None and self.phase in (None, "backward"):
            set_phase(node, "backward")
            node.meta.update(self._forward.get(backward, {}))
            return
        set_phase(node, self.phase or "forward")
        place = self._place()
        node.meta.update(place)
        if self.phase is None:
            self._forward.setdefault(_compat.forward_sequence_number(), place)

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {}
        line = current_user_line()
        if line is not None:
            place[SOURCE] = line
        stack = {
            self._names[module]: (self._names[module], type(module))
            for module in current_modules()
            if module in self._names
        }
        if stack:
            place[MODULES] = stack
        return place


@contextmanager
def tagged(tracer: Any, tag: Callable[[fx.Node], None]) -> Iterator[None]:
    """A context in which `tag` is called for every node that `tracer` creates, and operators that
    generated code cannot call are replaced."""
    create = tracer.create_node

    def create_and_tag(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create(*args, **kwargs)
        if node.op == "call_function":
            node.target = recorded(CALLABLE.get(node.target, node.target))
        tag(node)
        return node

    tracer.create_node = create_and_tag
    try:
        yield
    finally:
        del tracer.create_node
