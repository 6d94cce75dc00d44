"""Stage 4, Plan -> Budget: bytes per device and owner, operations per token, serving state. Before anything is launched."""

from nam_megatron.budget.memory import Budget, Moment, StageBudget, budget
from nam_megatron.budget.static import parameters

__all__ = ["Budget", "Moment", "StageBudget", "budget", "parameters"]
