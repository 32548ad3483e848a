"""Plan for a cluster that is not there: see `simulate`."""

from __future__ import annotations

from symmplan.simulation.links import PRESETS as PRESETS
from symmplan.simulation.links import Links as Links
from symmplan.simulation.report import Answer as Answer
from symmplan.simulation.report import Ordinary as Ordinary
from symmplan.simulation.report import SimulationReport as SimulationReport
from symmplan.simulation.run import simulate as simulate
from symmplan.simulation.timeline import Collective as Collective
from symmplan.simulation.timeline import Exposure as Exposure
from symmplan.simulation.timeline import Times as Times

__all__ = ["PRESETS", "Answer", "Collective", "Exposure", "Links", "Ordinary", "SimulationReport"]
__all__ += ["Times", "simulate"]
