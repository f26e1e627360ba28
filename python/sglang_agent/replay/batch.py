"""One replay: flush, then the batch through the gates of a live run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from sglang_agent.actions import ActionScheduler
from sglang_agent.admission import AdmissionGate
from sglang_agent.backoff import Backoff
from sglang_agent.batch import run_batch
from sglang_agent.clock import Clock, RealClock
from sglang_agent.conversation import Conversation
from sglang_agent.environments.recorded import RecordedEnvironment
from sglang_agent.errors import UsageError
from sglang_agent.inference import InferenceClient, TurnRequest
from sglang_agent.inference.chat import ChatClient
from sglang_agent.inference.generate import GenerateClient
from sglang_agent.inference.http import HttpSettings, HttpTransport
from sglang_agent.jobs import JobRunner
from sglang_agent.records import (
    EnvironmentStage,
    InferenceStage,
    Stage,
    TrajectoryRecord,
)
from sglang_agent.replay.conversations import ChatReplay, TokenReplay
from sglang_agent.sample import SamplePlan, Services
from sglang_agent.simulate.script import script_of
from sglang_agent.state import BatchState

FLUSH_TIMEOUT_S = 60.0


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to replay. ``api`` is ``generate`` (token-exact) or ``chat``.

    ``bypass_environment`` takes no time for environment jobs and sets no limit on
    them. ``warmup`` requests go before the cache is flushed and are in no figure.
    """

    base_url: str
    sample_concurrency: int
    env_concurrency: int
    job_order: str = "caas"
    caas_band_s: float = 30.0
    caas_duration_bucket_s: float = 1.0
    api: str = "generate"
    model: str = ""
    vocab_size: int = 256
    bypass_environment: bool = False
    time_scale: float = 1.0
    flush: bool = True
    warmup: int = 1
    stream: bool = True
    request_timeout_s: float | None = None
    max_retries: int = 3
    seed: int = 0


def prepare(record: TrajectoryRecord) -> TrajectoryRecord:
    """Give every turn but the last a job, and leave out a job after the last turn.

    Turns that follow each other without a job get one that takes no time.
    """
    jobs = {s.turn: s for s in record.stages if isinstance(s, EnvironmentStage)}
    turns = [s for s in record.stages if isinstance(s, InferenceStage)]
    stages: list[Stage] = []
    for stage in turns:
        stages.append(stage)
        if stage is not turns[-1]:
            nothing = EnvironmentStage(stage.turn, [], 0.0, 0.0, 0.0)
            stages.append(jobs.get(stage.turn, nothing))
    return msgspec.structs.replace(record, stages=stages)


def plan_of(
    record: TrajectoryRecord, settings: ReplaySettings, clock: Clock
) -> SamplePlan:
    """What the runner needs for one recorded trajectory.

    Raises :class:`UsageError` when the trace does not hold what the API needs.
    """
    ready = prepare(record)
    scale = 0.0 if settings.bypass_environment else settings.time_scale
    script = script_of(ready)
    if settings.api == "chat":
        ChatReplay(ready)  # refuses a trace without messages before anything runs

    def converse(_: object) -> Conversation:
        if settings.api == "chat":
            return ChatReplay(ready)
        return TokenReplay(script, settings.vocab_size)

    return SamplePlan(
        key=record.label,
        label=record.label,
        sample_id=record.sample_id,
        environment=lambda: RecordedEnvironment(ready, clock, scale),
        converse=converse,
        initial_messages=record.initial_messages,
        initial_tokens=record.initial_tokens,
    )


async def replay(
    records: Sequence[TrajectoryRecord],
    settings: ReplaySettings,
    on_done: Callable[[TrajectoryRecord], None] = lambda _: None,
) -> list[TrajectoryRecord]:
    """Replay ``records`` in submission order and return them as they went this time.

    Times count from the first submission. Raises :class:`UsageError` when the server
    cannot be flushed or a trajectory cannot be replayed over the chosen API.
    """
    clock = RealClock()
    plans = [plan_of(record, settings, clock) for record in records]
    async with AsyncExitStack() as stack:
        client = _client(settings, clock)
        stack.push_async_callback(client.close)
        await _warm_up(client, settings)
        if settings.flush:
            await _flush(settings.base_url)
        state = BatchState(len(plans), 0, clock)
        jobs = len(plans) if settings.bypass_environment else settings.env_concurrency
        actions = ActionScheduler(
            jobs,
            settings.job_order,
            band_s=settings.caas_band_s,
            duration_bucket_s=settings.caas_duration_bucket_s,
            clock=clock,
        )
        services = Services(
            inference=client,
            jobs=JobRunner(actions, Backoff(1.0, 30.0, settings.seed)),
            state=state,
            origin_s=clock.now(),
        )
        done: dict[str, TrajectoryRecord] = {}

        async def keep(plan: SamplePlan, record: TrajectoryRecord) -> None:
            done[plan.key] = record
            on_done(record)

        admission = AdmissionGate(settings.sample_concurrency, clock=clock)
        await run_batch(plans, services, admission, keep)
    return [done[record.label] for record in records]


def _client(settings: ReplaySettings, clock: RealClock) -> InferenceClient:
    transport = HttpTransport(
        HttpSettings(
            base_url=settings.base_url,
            request_timeout_s=settings.request_timeout_s,
            max_retries=settings.max_retries,
            seed=settings.seed,
        ),
        clock,
    )
    if settings.api == "chat":
        return ChatClient(transport, settings.model, stream=settings.stream)
    return GenerateClient(transport, stream=settings.stream)


async def _warm_up(client: InferenceClient, settings: ReplaySettings) -> None:
    for number in range(1, settings.warmup + 1):
        await client.complete(
            TurnRequest(
                label=f"warm-up-{number}",
                turn=1,
                messages=[{"role": "user", "content": "warm-up"}],
                input_ids=list(range(32, 96)),
                max_tokens=8,
                exact_tokens=8 if settings.api == "generate" else None,
            )
        )


async def _flush(base_url: str) -> None:
    """Empty the cache of the server, or of all workers behind a gateway."""
    timeout = aiohttp.ClientTimeout(total=FLUSH_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            async with session.post(f"{base_url}/flush_cache") as response:
                if response.status == 200:
                    return
                reason = f"HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
    raise UsageError(
        f"--base-url: {base_url} did not flush its cache ({reason}); "
        "--no-flush replays with whatever is cached"
    )
