"""Lightning callbacks that work with any LightningModule."""

from .adapt import Adapt
from .add_gates import AddGates
from .budget_controller import BudgetController
from .collapse_detector import CollapseDetector
from .consolidation import EWC, SynapticIntelligence
from .distill import Distill
from .exact_resume import ExactResume
from .gate_monitor import GateMonitor
from .gate_penalty import GatePenalty
from .magnitude_pruning import MagnitudePruning
from .minimum_activity import MinimumActivity
from .revive_dormant import ContinualBackprop, ReviveDormant
from .rigl import RigL
from .routing_monitor import RoutingMonitor
from .schedules import TemperatureAnnealing, ThresholdPhases, ThresholdRamp
from .sparse import SET, StaticSparse
from .task_gates import TaskGates
from .tasks import TaskHeads, TaskMonitor

__all__ = [
    "EWC",
    "SET",
    "Adapt",
    "AddGates",
    "BudgetController",
    "CollapseDetector",
    "ContinualBackprop",
    "Distill",
    "ExactResume",
    "GateMonitor",
    "GatePenalty",
    "MagnitudePruning",
    "MinimumActivity",
    "ReviveDormant",
    "RigL",
    "RoutingMonitor",
    "StaticSparse",
    "SynapticIntelligence",
    "TaskGates",
    "TaskHeads",
    "TaskMonitor",
    "TemperatureAnnealing",
    "ThresholdPhases",
    "ThresholdRamp",
]
