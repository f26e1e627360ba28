"""One sample from admission to its record: the loop of equation 10.

Live tasks, replays and simulations differ in the :class:`SamplePlan` and in the
clients they bring; the loop, the gates and the failure classes are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_agent.conversation import (
    BudgetExhausted,
    Conversation,
    RefusingConversation,
    UserConversation,
)
from sglang_agent.environments.base import (
    Environment,
    EnvironmentFailure,
    GradingEnvironment,
    UserEnvironment,
)
from sglang_agent.errors import JobAbandoned, QueueTimeout
from sglang_agent.gate import Gate
from sglang_agent.inference import InferenceClient, InferenceFailure
from sglang_agent.jobs import JobLimits, JobOutcome, JobRunner
from sglang_agent.labels import current_label
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Message,
    Operation,
    Outcome,
    ToolDefinition,
    TrajectoryRecord,
)
from sglang_agent.state import BatchState, Stage
from sglang_agent.trajectory import Trajectory

log = logging.getLogger(__name__)

# Several transport errors in a row are a broken environment, not bad luck.
TRANSPORT_ERRORS_IN_A_ROW = 5


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """What is needed to run one sample, again from the start if need be.

    ``environment`` builds a fresh environment (None: the sample has none), and
    ``converse`` a fresh conversation over the tools that environment offers. Times in
    seconds.
    """

    key: str
    label: str
    sample_id: str
    environment: Callable[[], Environment] | None
    converse: Callable[[Sequence[ToolDefinition]], Conversation]
    initial_messages: list[Message] | None = None
    initial_tokens: int | None = None
    job_limits: JobLimits = field(default_factory=JobLimits)
    sample_timeout_s: float | None = None


@dataclass(frozen=True)
class Services:
    """What all samples of a run share. ``origin_s`` is the zero of recorded times.

    ``starts`` bounds how many environments are being started at once.
    ``turn_done`` hears of every finished turn, whatever becomes of its sample.
    """

    inference: InferenceClient
    jobs: JobRunner
    state: BatchState
    origin_s: float
    starts: Gate | None = None
    close_timeout_s: float = 10.0
    sample_retries: int = 0
    turn_done: Callable[[InferenceStage], None] | None = None


class SampleRunner:
    """Runs one plan; use once."""

    def __init__(self, plan: SamplePlan, services: Services) -> None:
        self._plan = plan
        self._services = services
        self._clock = services.state.clock
        self._stages: list[InferenceStage | EnvironmentStage] = []
        self._tools: list[ToolDefinition] | None = None
        self._score: float | None = None
        self._stage: Stage | None = None

    async def run(self, submitted_s: float, admitted_s: float) -> TrajectoryRecord:
        """Run to an end and return the record; a failure is an outcome, not an error.

        Both times are on the clock. Only cancellation comes out as an exception, after
        the environment was closed.
        """
        token = current_label.set(self._plan.label)
        try:
            attempt = 1
            while True:
                outcome, error = await self._attempt(admitted_s)
                again = outcome in (Outcome.ENVIRONMENT, Outcome.INFERENCE)
                if not again or attempt > self._services.sample_retries:
                    break
                attempt += 1
        finally:
            current_label.reset(token)
        return TrajectoryRecord(
            label=self._plan.label,
            sample_id=self._plan.sample_id,
            initial_messages=self._plan.initial_messages,
            initial_tokens=self._plan.initial_tokens,
            tools=self._tools,
            submitted_s=self._since(submitted_s),
            admitted_s=self._since(admitted_s),
            ended_s=self._since(self._clock.now()),
            outcome=outcome,
            error=error,
            score=self._score,
            attempts=attempt,
            stages=self._stages,
        )

    async def _attempt(self, admitted_s: float) -> tuple[Outcome, str | None]:
        """Run once with a fresh environment and say how it ended."""
        self._stages, self._tools, self._score = [], None, None
        limit_s = self._plan.sample_timeout_s
        left_s = None
        if limit_s is not None:
            left_s = max(0.0, admitted_s + limit_s - self._clock.now())
        try:
            async with self._clock.timeout(left_s):
                return await self._with_environment()
        except TimeoutError:
            reason = f"sample limit of {limit_s:g} s reached while {self._where()}"
            return Outcome.BUDGET, reason

    async def _with_environment(self) -> tuple[Outcome, str | None]:
        environment = None
        try:
            if self._plan.environment is not None:
                self._move(Stage.OPENING)
                environment = self._plan.environment()
                self._tools = await self._open(environment)
            conversation = self._plan.converse(self._tools or [])
            await self._talk(conversation, environment)
            return await self._grade(conversation, environment)
        except (EnvironmentFailure, JobAbandoned, QueueTimeout) as error:
            return Outcome.ENVIRONMENT, str(error)
        except InferenceFailure as error:
            return Outcome.INFERENCE, str(error)
        except BudgetExhausted as error:
            return Outcome.BUDGET, str(error)
        except Exception as error:
            log.exception("sample %s failed in our own code", self._plan.sample_id)
            return Outcome.OURS, f"{type(error).__name__}: {error}"
        finally:
            if environment is not None:
                await self._close(environment)

    async def _open(self, environment: Environment) -> list[ToolDefinition]:
        starts = self._services.starts
        if starts is None:
            return list(await environment.open())
        ticket = await starts.acquire(self._plan.label)
        try:
            return list(await environment.open())
        finally:
            starts.release(ticket)

    async def _talk(
        self, conversation: Conversation, environment: Environment | None
    ) -> None:
        """Alternate inference and environment stages until the final response."""
        trajectory = Trajectory(self._plan.label)
        unreached = 0
        while True:
            operations = await self._turn(conversation, trajectory)
            if not operations:
                if self._refused(trajectory, conversation):
                    continue
                if await self._user_goes_on(trajectory, conversation, environment):
                    continue
                return
            if environment is None:
                raise EnvironmentFailure("the model called a tool, but there is none")
            done = await self._act(trajectory, environment, operations)
            self._record_job(trajectory, operations, done, conversation)
            unreached = _unreached_in_a_row(unreached, done)
            if unreached >= TRANSPORT_ERRORS_IN_A_ROW:
                raise EnvironmentFailure(
                    f"{done.server or 'environment'}: {unreached} calls in a row did"
                    f" not reach their tool; the last said: {_last_text(done)}"
                )

    async def _turn(
        self, conversation: Conversation, trajectory: Trajectory
    ) -> Sequence[Operation]:
        request = conversation.next_request()
        self._move(Stage.INFERENCE)
        answer = await self._services.inference.complete(request)
        trajectory.complete_turn(answer.end_s - answer.start_s)
        first_s = answer.first_token_s
        stage = InferenceStage(
            turn=trajectory.turns,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            start_s=self._since(answer.start_s),
            first_token_s=None if first_s is None else self._since(first_s),
            end_s=self._since(answer.end_s),
            worker=answer.worker,
            attempts=answer.attempts,
            message=answer.message,
            output_ids=answer.output_ids,
        )
        self._stages.append(stage)
        if self._services.turn_done is not None:
            self._services.turn_done(stage)
        return conversation.accept(answer)

    async def _act(
        self,
        trajectory: Trajectory,
        environment: Environment,
        operations: Sequence[Operation],
    ) -> JobOutcome:
        queued_s = self._clock.now()
        try:
            return await self._services.jobs.run(
                trajectory, environment, operations, self._plan.job_limits, self._move
            )
        except (EnvironmentFailure, JobAbandoned, QueueTimeout) as error:
            # The stage that broke the sample belongs into its trace.
            now_s = self._clock.now()
            self._stages.append(
                EnvironmentStage(
                    turn=trajectory.turns,
                    operations=list(operations),
                    queued_s=self._since(queued_s),
                    started_s=self._since(now_s),
                    ended_s=self._since(now_s),
                    server=environment.server_of(operations),
                    error=str(error),
                )
            )
            raise

    def _record_job(
        self,
        trajectory: Trajectory,
        operations: Sequence[Operation],
        done: JobOutcome,
        conversation: Conversation,
    ) -> None:
        self._stages.append(
            EnvironmentStage(
                turn=trajectory.turns,
                operations=list(operations),
                queued_s=self._since(done.queued_s),
                started_s=self._since(done.started_s),
                ended_s=self._since(done.ended_s),
                server=done.server,
                response=conversation.respond(done.results),
            )
        )

    def _refused(self, trajectory: Trajectory, conversation: Conversation) -> bool:
        """Answer calls that came too late; True when the model has to be asked again."""
        if not isinstance(conversation, RefusingConversation):
            return False
        said = conversation.refuse()
        if said is not None:
            self._record_said(trajectory, said)
        return said is not None

    async def _user_goes_on(
        self,
        trajectory: Trajectory,
        conversation: Conversation,
        environment: Environment | None,
    ) -> bool:
        """Append what the user says next, if the environment has a user who does.

        It needs no slot and takes no time, but a replay needs it for its context.
        """
        if not isinstance(environment, UserEnvironment):
            return False
        if not isinstance(conversation, UserConversation):
            return False
        said = await environment.next_user_turn()
        if said is None:
            return False
        self._record_said(trajectory, conversation.say(said))
        return True

    def _record_said(self, trajectory: Trajectory, said: list[Message]) -> None:
        """Keep what joined the context without a job as a stage without operations."""
        now_s = self._since(self._clock.now())
        self._stages.append(
            EnvironmentStage(
                turn=trajectory.turns,
                operations=[],
                queued_s=now_s,
                started_s=now_s,
                ended_s=now_s,
                response=said,
            )
        )

    async def _grade(
        self, conversation: Conversation, environment: Environment | None
    ) -> tuple[Outcome, str | None]:
        if not isinstance(environment, GradingEnvironment):
            return Outcome.COMPLETED, None
        self._move(Stage.SCORING)
        try:
            self._score = await environment.score(conversation.transcript())
        except Exception as error:
            return Outcome.GRADING, f"{type(error).__name__}: {error}"
        return Outcome.COMPLETED, None

    async def _close(self, environment: Environment) -> None:
        """Release the environment whatever happened; its failure is only logged."""
        self._move(Stage.CLOSING)
        try:
            async with self._clock.timeout(self._services.close_timeout_s):
                await environment.close()
        except Exception as error:
            log.warning(
                "sample %s: closing its environment failed: %s",
                self._plan.sample_id,
                f"{type(error).__name__}: {error}",
            )

    def _move(self, stage: Stage) -> None:
        if stage is not Stage.CLOSING:
            self._stage = stage
        self._services.state.move(self._plan.label, self._plan.sample_id, stage)

    def _where(self) -> str:
        if self._stage is None:
            return "admitted"
        return f"in {self._stage.value} (turn {len(self._stages) // 2 + 1})"

    def _since(self, time_s: float) -> float:
        return time_s - self._services.origin_s


def _unreached_in_a_row(before: int, done: JobOutcome) -> int:
    for result in done.results:
        before = before + 1 if result.transport_error else 0
    return before


def _last_text(done: JobOutcome) -> str:
    return done.results[-1].content[:300]
