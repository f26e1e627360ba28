"""How fast an engine on the CPU prefills and decodes; one JSON document out.

    python benchmark/cpu/speed.py --url http://127.0.0.1:30000

Talks to a running server with an empty queue. Prompts are seeded random byte tokens,
never repeated, so that nothing is cached. Prefill is timed as the latency of a request
for one token; a decode step as the extra latency of each further token.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROMPT_TOKENS = (512, 2048, 8192)
BATCHES = (1, 8, 16)
STEPS = 64
CONTEXT_TOKENS = 64
REPEATS = 3


class Server:
    """A running engine."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self._random = random.Random(seed)

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.loads(response.read())

    def latency_s(self, prompt_tokens: int, new_tokens: int) -> float:
        """Seconds of one request; wall clock of the client."""
        prompt = self._random.choices(range(3, 259), k=prompt_tokens)
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        started = time.perf_counter()
        self.call("/generate", {"input_ids": prompt, "sampling_params": sampling})
        return time.perf_counter() - started

    def prefill_tokens_per_s(self, prompt_tokens: int) -> float:
        times = [self.latency_s(prompt_tokens, 1) for _ in range(REPEATS)]
        return prompt_tokens / statistics.median(times)

    def step_ms(self, batch: int) -> float:
        """Milliseconds of a decode step with ``batch`` requests running."""

        def together(new_tokens: int) -> float:
            with ThreadPoolExecutor(batch) as pool:
                started = time.perf_counter()
                jobs = [
                    pool.submit(self.latency_s, CONTEXT_TOKENS, new_tokens)
                    for _ in range(batch)
                ]
                for job in jobs:
                    job.result()
                return time.perf_counter() - started

        short = statistics.median(together(1) for _ in range(REPEATS))
        long = statistics.median(together(1 + STEPS) for _ in range(REPEATS))
        return (long - short) / STEPS * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="base URL of the server")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts (default 0)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        nargs="+",
        default=PROMPT_TOKENS,
        metavar="N",
        help="lengths to prefill (default 512 2048 8192)",
    )
    options = parser.parse_args()
    server = Server(options.url, options.seed)
    info = server.call("/model_info")
    server.latency_s(CONTEXT_TOKENS, 4)  # first-use costs are not the question
    print(
        json.dumps(
            {
                "model": Path(info["model_path"]).name,
                "prefill_tokens_per_s": {
                    n: round(server.prefill_tokens_per_s(n))
                    for n in options.prompt_tokens
                },
                "decode_step_ms": {n: round(server.step_ms(n), 1) for n in BATCHES},
            }
        )
    )


if __name__ == "__main__":
    main()
