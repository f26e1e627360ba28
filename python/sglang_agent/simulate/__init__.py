"""A batch in virtual time: real schedulers, real gates, invented durations.

W virtual workers (``python -m sglang.virtual_worker``, a real SGLang scheduler each)
stand behind a routing policy of :mod:`sgl_router.policies`; trajectories pass the same
:class:`~sglang_agent.AdmissionGate` and :class:`~sglang_agent.ActionScheduler` as in a
live run, on a virtual clock. Only the durations of forward passes are a model
(:mod:`.cost_model`).
"""

from sglang_agent.simulate.batch import SimulationResult, simulate
from sglang_agent.simulate.cost_model import Deployment, load_deployment
from sglang_agent.simulate.settings import SimulationSettings

__all__ = [
    "Deployment",
    "SimulationResult",
    "SimulationSettings",
    "load_deployment",
    "simulate",
]
