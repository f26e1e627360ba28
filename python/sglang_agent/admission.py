"""How many samples are active at once: the sample concurrency CS."""

from __future__ import annotations

from types import TracebackType

from sglang_agent import gate
from sglang_agent.clock import Clock
from sglang_agent.gate import Gate, GateOwner, Ticket


class AdmissionGate(GateOwner):
    """Admits samples in submission order; a place is held until the sample ends.

    One gate is the scope of the limit: share it between all task groups of a run.
    ``capacity`` may change at any time; lowering it interrupts nobody, and while
    ``paused`` nobody is admitted. A sample that an admitted sample starts inside
    itself belongs to it and takes no place of its own, so nesting cannot deadlock.
    Raises ValueError for a capacity below 1.
    """

    def __init__(self, capacity: int, *, clock: Clock | None = None) -> None:
        self._gate = Gate(capacity, clock=clock)

    def admit(self, label: str) -> Admission:
        """Wait for admission: ``async with gate.admit(label):``.

        Call it in submission order; cancelling the waiter leaves the queue.
        """
        return Admission(self._gate, label)


class Admission:
    """One sample's stay; ``admitted_s`` is on the gate's clock."""

    __slots__ = ("_before", "_gate", "_label", "_ticket", "admitted_s")

    def __init__(self, admission_gate: Gate, label: str) -> None:
        self._gate = admission_gate
        self._label = label
        self._ticket: Ticket | None = None
        self._before: tuple[Ticket, ...] = ()
        self.admitted_s = 0.0

    async def __aenter__(self) -> Admission:
        if self._gate.held_here() is None:
            self._ticket = await self._gate.acquire(self._label)
            self._before = gate.enter(self._ticket)
        self.admitted_s = self._gate.clock.now()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ticket is not None:
            gate.leave(self._before)
            self._gate.release(self._ticket)
