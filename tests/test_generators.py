"""Which random number generators an operator may draw from."""

from __future__ import annotations

from typing import Any, cast

import torch

from graphopt.ir.generators import generators_used
from graphopt.runtime.generators import DrawnGenerators
from sketch import Sketch

DEFAULT = torch.random.default_generator


def test_generators_that_are_given() -> None:
    own = torch.Generator()
    assert generators_used(()) == [DEFAULT]
    assert generators_used([torch.ones(2), {"generator": own}, torch.device("cpu")]) == [
        DEFAULT,
        own,
    ]


def test_a_graph_puts_back_what_it_draws_from() -> None:
    own = torch.Generator()
    s = Sketch()
    x = s.input("x", 4)
    drawn = s.call(torch.ops.aten.bernoulli.default, x, generator=None)
    gm = s.step([drawn])
    drawn.kwargs = {"generator": cast(Any, own)}
    generators = DrawnGenerators(gm.graph)
    states = generators.states()
    assert len(states) == 2
    before, _ = own.get_state(), own.seed()
    generators.restore(states)
    assert torch.equal(own.get_state(), before)
