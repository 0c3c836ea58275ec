"""Cost models: the seconds that a step's operators and collectives take.

A `CostModel` answers two questions, for a node of a graph: how long does the device compute, and
what does a collective ask of a link. Operators by a roofline, which needs no device, or as measured
(`calibrate`); collectives by the alpha-beta model, from a preset or a table, or as measured on the
real group. `graphopt.simulate` and the scheduling passes ask it.
"""

from __future__ import annotations

from graphopt.cost.calibration import calibrate, costs_in
from graphopt.cost.collectives import (
    NETWORKS,
    Collective,
    CollectiveTable,
    Network,
    Transfer,
    collective_of,
)
from graphopt.cost.errors import CostTableError
from graphopt.cost.model import CostModel, default_cost_model
from graphopt.cost.operators import OperatorTable, operator_key
from graphopt.cost.roofline import DEVICES, Device, RooflineCost

__all__ = [
    "DEVICES",
    "NETWORKS",
    "Collective",
    "CollectiveTable",
    "CostModel",
    "CostTableError",
    "Device",
    "Network",
    "OperatorTable",
    "RooflineCost",
    "Transfer",
    "calibrate",
    "collective_of",
    "costs_in",
    "default_cost_model",
    "operator_key",
]
