"""Runs batches of LLM-agent tasks in the shortest wall time.

The names below are the library; ``python -m sglang_agent --help`` is the program.
"""

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.clock import Clock, RealClock, VirtualClock
from sglang_agent.errors import JobAbandoned, QueueTimeout, RunTimeout, WouldBlock
from sglang_agent.gate import GateStatistics, ServerLimit
from sglang_agent.trajectory import Trajectory

__all__ = [
    "ActionScheduler",
    "AdmissionGate",
    "Clock",
    "GateStatistics",
    "JobAbandoned",
    "QueueTimeout",
    "RealClock",
    "RunTimeout",
    "ServerLimit",
    "Trajectory",
    "VirtualClock",
    "WouldBlock",
]
