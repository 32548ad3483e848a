"""Plan for a cluster that is not there: see `simulate`."""

from __future__ import annotations

from symmplan.simulation.report import Answer as Answer
from symmplan.simulation.report import Collective as Collective
from symmplan.simulation.report import Ordinary as Ordinary
from symmplan.simulation.report import SimulationReport as SimulationReport
from symmplan.simulation.run import simulate as simulate

__all__ = ["Answer", "Collective", "Ordinary", "SimulationReport", "simulate"]
