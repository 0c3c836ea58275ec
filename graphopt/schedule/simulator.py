"""A discrete-event simulator of steps, which runs iterations until they are all alike.

One stream computes in the order of the program and stops at a wait until its message has arrived;
messages travel meanwhile (`graphopt.schedule.links`). Where late work hangs over into the next
iteration, the first iterations are unlike those that follow; what is reported is the steady state.
Compute between two waits or launches is one event, so that the work is linear in nodes, and in
collectives times groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import fx

from graphopt.cost import CostModel, default_cost_model
from graphopt.schedule.links import HandedOn, Links, MessageInFlight
from graphopt.schedule.program import Message, Program, peak_bytes, program_of
from graphopt.schedule.timeline import CollectiveSlot, ComputeSlot, Timeline

MOST_ITERATIONS = 24
SAME = 1e-9
"""The relative difference up to which two iterations' times count as equal."""


def simulate(
    graph_module: fx.GraphModule, cost_model: CostModel | None = None, world_size: int | None = None
) -> Timeline:
    """Predicts the timeline of a step in the steady state.

    Args:
        graph_module: in the captured dialect; an `IterGraphModule` may have late nodes.
        cost_model: None: presets by the devices in the graph (`default_cost_model`).
        world_size: ranks of its groups, where these are not there to be asked.

    Raises:
        CostTableError: a cost is negative or not finite.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = captured.graph_module
    >>> graphopt.simulate(gm).step_seconds > 0
    True
    """
    model = cost_model or default_cost_model(graph_module.graph)
    program = program_of(graph_module.graph, model, world_size)
    return simulate_program(program, model.slowdown)


def simulate_program(program: Program, slowdown: float = 0.0) -> Timeline:
    """Simulates a program's steady state.

    Args:
        slowdown: of a `CostModel`.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import program_of, simulate_program
    >>> program = program_of(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> simulate_program(program).step_seconds > 0
    True
    """
    machine = _Machine(slowdown)
    step = _steady(machine, _actions(program))
    begin = machine.now
    machine.record = True
    machine.iterate(_actions(program, every_node=True))
    return _timeline(program, machine, step, begin)


def steady_seconds(program: Program, slowdown: float = 0.0) -> float:
    """Returns the seconds of a program's iteration in the steady state, without a timeline.

    >>> from graphopt.cost import default_cost_model
    >>> from graphopt.schedule import program_of, simulate_program
    >>> from graphopt.schedule.simulator import steady_seconds
    >>> program = program_of(gm.graph, default_cost_model(gm.graph), world_size=2)
    >>> steady_seconds(program) == simulate_program(program).step_seconds
    True
    """
    return _steady(_Machine(slowdown), _actions(program))


def _steady(machine: _Machine, actions: list[Action]) -> float:
    """Runs iterations until they are alike, and returns the seconds of one.

    Iterations may take equally long for a while, though each hands on more to the next than it was
    handed: until that reaches a wait. What lies between is passed over.
    """
    durations: list[float] = []
    handed_on: HandedOn = {}
    for _ in range(MOST_ITERATIONS):
        begin, before = machine.now, handed_on
        machine.iterate(actions)
        durations.append(machine.now - begin)
        handed_on = machine.links.handed_on()
        if not _are_alike(durations):
            continue
        growth = _growth(machine, before, handed_on, SAME * durations[-1])
        if not growth:
            return durations[-1]
        iterations = _passed_over(machine, growth)
        if iterations:
            machine.links.skip_iterations(growth, iterations)
            handed_on = machine.links.handed_on()
    return sum(durations[-8:]) / len(durations[-8:])


def _growth(machine: _Machine, before: HandedOn, handed_on: HandedOn, least: float) -> HandedOn:
    """Returns by how much more than `least` an iteration changed the link state; groups that nobody
    waits for are ignored."""
    growth = {name: handed_on[name] - before[name] for name in handed_on if name in machine.slack}
    return {name: more for name, more in growth.items() if abs(more) > least}


def _passed_over(machine: _Machine, growth: HandedOn) -> int:
    """Returns how many iterations like the last one can be skipped; none while a group drains its
    backlog."""
    rooms = (machine.slack[name] / more if more > 0 else 0.0 for name, more in growth.items())
    return math.floor(min(rooms))


def _are_alike(durations: list[float]) -> bool:
    if len(durations) < 3:
        return False
    a, b, c = durations[-3:]
    return abs(a - c) <= SAME * c and abs(b - c) <= SAME * c


Action = tuple[fx.Node, float, Message | None]
"""A node with its seconds of compute, or with the message that it launches or waits for."""


def _actions(program: Program, every_node: bool = False) -> list[Action]:
    """Returns the stream's actions, with runs of compute merged unless `every_node`."""
    actions: list[Action] = []
    for node in program.order:
        if node in program.seconds:
            seconds = program.seconds[node]
            if not every_node and actions and actions[-1][2] is None:
                seconds += actions.pop()[1]
            actions.append((node, seconds, None))
        message = program.launched.get(node) or program.waited.get(node)
        if message is not None:
            actions.append((node, 0.0, message))
    return actions


@dataclass
class _Machine:
    """One simulated rank: its stream, its links, and the launches of the iteration before."""

    slowdown: float
    links: Links = field(default_factory=Links)
    now: float = 0.0
    record: bool = False
    computed: list[ComputeSlot] = field(default_factory=list)
    stalls: list[tuple[float, float, MessageInFlight]] = field(default_factory=list)
    before: dict[Message, MessageInFlight] = field(default_factory=dict)
    current: dict[Message, MessageInFlight] = field(default_factory=dict)
    slack: dict[str, float] = field(default_factory=dict)
    """For each group, the seconds by which its messages could have arrived later in the last
    iteration without delaying a wait."""

    def iterate(self, actions: list[Action]) -> None:
        """Runs one iteration."""
        self.before, self.current, self.slack = self.current, {}, {}
        for node, seconds, message in actions:
            if message is None:
                self._compute(seconds, node)
            elif node is message.launch:
                flight = self.current[message] = MessageInFlight(message, self.now)
                self.links.launch(flight)
            else:
                self._wait(message)

    def pass_time(self, most: float = math.inf) -> float:
        """Advances the clock to the next change on the links, by at most so many seconds. Returns
        by how many."""
        passed = min(most, self.links.until_change())
        self.links.advance(self.now, passed)
        self.now += passed
        return passed

    def _compute(self, seconds: float, node: fx.Node) -> None:
        start, left = self.now, seconds
        while left > 0:
            if not self.links.busy:
                self.now += left
                break
            needed = left * (1 + self.slowdown)
            passed = self.pass_time(needed)
            left = 0.0 if passed >= needed else left - passed / (1 + self.slowdown)
        if self.record:
            self.computed.append(ComputeSlot(node, start, self.now))

    def _wait(self, message: Message) -> None:
        flight = (self.before if message.lag else self.current).get(message)
        if flight is None:  # late, in the first iteration
            return
        start = self.now
        early = 0.0 if flight.end is None else start - flight.end
        self.slack[message.group] = min(early, self.slack.get(message.group, early))
        while flight.end is None:
            self.pass_time()
        if self.record and self.now > start:
            self.stalls.append((start, self.now, flight))


def _timeline(program: Program, machine: _Machine, step: float, begin: float) -> Timeline:
    end = machine.now
    while machine.links.busy:  # what the last iteration has launched arrives after it
        machine.pass_time()
    exposed: dict[Message, float] = {}
    for start, stop, flight in machine.stalls:
        exposed[flight.message] = exposed.get(flight.message, 0.0) + stop - start
    position = {node: index for index, node in enumerate(program.order)}
    slots = [
        _slot(flight, exposed.get(message, 0.0), position)
        for message, flight in machine.current.items()
    ]
    return Timeline(
        program=program,
        step_seconds=step,
        begin=begin,
        end=end,
        compute=machine.computed,
        collectives=slots,
        peak_bytes_in_flight=_most_in_flight(program),
        peak_bytes=peak_bytes(program),
    )


def _slot(flight: MessageInFlight, exposed: float, position: dict[fx.Node, int]) -> CollectiveSlot:
    assert flight.start is not None and flight.end is not None
    message = flight.message
    distance = None
    if message.waits:
        apart = position[message.waits[0]] - position[message.launch]
        distance = apart + message.lag * len(position)
    return CollectiveSlot(message, flight.launched, flight.start, flight.end, exposed, distance)


def _most_in_flight(program: Program) -> int:
    """Returns the peak bytes of messages in flight in the steady state."""
    left = {message: len(message.waits) for message in program.messages}
    held = sum(message.nbytes for message in program.messages if message.lag)
    most = held
    for node in program.order:
        if node in program.launched:
            held += program.launched[node].nbytes
            most = max(most, held)
        elif node in program.waited:
            message = program.waited[node]
            left[message] -= 1
            if not left[message]:
                held -= message.nbytes
    return most
