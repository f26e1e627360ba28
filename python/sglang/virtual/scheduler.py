"""The scheduler, with its two ends open: a null forward pass and a list of outputs."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang.virtual.protocol import Request
from sglang.virtual.script import Script, attach, script_of

# Looking at every waiting request is not worth it for a mere lower bound.
_MANY_WAITING = 256


class _Collector(SchedulerOutputStreamer):
    """Keeps finished requests instead of sending text to a detokenizer."""

    __slots__ = ("finished",)

    def __post_init__(self) -> None:
        SchedulerOutputStreamer.__post_init__(self)
        self.finished: list[Req] = []

    def stream_output(
        self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None
    ) -> None:
        for req in reqs:
            if req.finished() and req is not skip_req and not req.finished_output:
                req.finished_output = True
                if req.finished_len is None:
                    req.finished_len = len(req.output_ids)
                self.finished.append(req)


def _null_forward(batch: Any, **_: Any) -> GenerationBatchResult:
    """Sample every request's next scripted token."""
    tokens = [script_of(req).next_token(req) for req in batch.reqs]
    return GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))


class VirtualScheduler(Scheduler):
    """A real scheduler that is stepped from outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._scripts: dict[str, Script] = {}
        self._given_up: list[Req] = []
        super().__init__(*args, **kwargs)
        self.tp_worker.forward_batch_generation = _null_forward
        # Nobody reads them, and every pass would write them.
        self.load_snapshot_writer = None
        self.metrics_reporter.is_stats_logging_rank = False

    def submit(self, request: Request, tokens: array, script: Script) -> None:
        """Hand a request in, as the tokenizer process would."""
        sampling = SamplingParams(
            max_new_tokens=request.max_new_tokens, ignore_eos=request.ignore_eos
        )
        sampling.normalize(None)
        self._scripts[request.id] = script
        self.process_input_requests(
            [
                TokenizedGenerateReqInput(
                    rid=request.id,
                    input_text=None,
                    input_ids=tokens,
                    input_embeds=None,
                    mm_inputs=None,
                    sampling_params=sampling,
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    token_type_ids=None,
                    stream=False,
                    routing_key=request.label,
                    time_stats=None,
                )
            ]
        )

    def next_batch(self) -> ScheduleBatch | None:
        """What the event loop would run next."""
        plan = self.get_next_batch_to_run(
            running_batch=self.running_batch, last_batch=self.last_batch
        )
        self.running_batch = plan.running_batch
        return plan.batch_to_run

    def take_finished(self) -> list[Req]:
        """Requests that ended since the last call, given-up ones last."""
        finished = self.output_streamer.finished + self._given_up
        self.output_streamer.finished = []
        self._given_up = []
        return finished

    def shortest_remaining(self) -> int | None:
        """Passes before any request can end, at least; None without requests."""
        known = [*self.running_batch.reqs]
        if self.last_batch is not None:
            known += self.last_batch.reqs
        if self.chunked_req is not None:
            known.append(self.chunked_req)
        if len(self.waiting_queue) > _MANY_WAITING:
            return 1
        known += self.waiting_queue
        left = [script_of(req).remaining(req) for req in known if not req.finished()]
        return max(1, min(left)) if left else None

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return _Collector

    def send_abort_output(self, abort_req: Any, req: Req) -> None:
        self._given_up.append(req)

    def _create_generation_req(
        self, recv_req: TokenizedGenerateReqInput, *args: Any, **kwargs: Any
    ) -> Req:
        req = super()._create_generation_req(recv_req, *args, **kwargs)
        attach(req, self._scripts.pop(recv_req.rid))
        return req
