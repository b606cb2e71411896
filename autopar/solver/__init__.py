"""The placement solver: one choice per node, pairwise costs, a limit on memory over time. Plain data in and out."""

from autopar.solver.problem import AssignmentProblem, Conflict, Edge, Node, Solution, Usage
from autopar.solver.solve import PeakResult, minimum_peak, solve

__all__ = [
    "AssignmentProblem",
    "Conflict",
    "Edge",
    "Node",
    "PeakResult",
    "Solution",
    "Usage",
    "minimum_peak",
    "solve",
]
