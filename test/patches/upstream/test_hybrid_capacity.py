"""Unit tests for the workload-aware split of the hybrid cache."""

import argparse
import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from sglang.plan_hybrid_cache import main as plan_hybrid_cache
from sglang.srt.mem_cache import hybrid_capacity_engine
from sglang.srt.mem_cache.hybrid_capacity import (
    CapacityError,
    PoolSizes,
    UnitCosts,
    balanced_capacity,
    balancing_ratio,
    deployed_ratio,
    ratio_for_concurrency,
    size_pools,
)
from sglang.srt.mem_cache.hybrid_capacity_engine import (
    apply_hybrid_workload_profile,
    hybrid_capacity_section,
    ratio_origin,
    report_hybrid_capacity,
)
from sglang.srt.mem_cache.hybrid_model_costs import Deployment, read_model_costs
from sglang.srt.mem_cache.hybrid_workload_profile import (
    ProfileError,
    exit_on_bad_profile,
    load_workload_profile,
)
from sglang.srt.runtime_context import get_context, get_schedule
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

COSTS = UnitCosts(
    kv_bytes_per_row=70 * KIB,
    state_bytes_per_slot=40 * MIB,
    state_slots_per_request=5,
)

# Three KDA layers and one of latent attention.
TINY_KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}


class TestModel(CustomTestCase):
    """Equations and the allocator's arithmetic."""

    def test_balance(self):
        self.assertAlmostEqual(balancing_ratio(COSTS, 60_000), 0.0488, places=4)
        self.assertEqual(int(balanced_capacity(40 * GIB, COSTS, 60_000)), 9)

    def test_target_concurrency(self):
        ratio = ratio_for_concurrency(40 * GIB, COSTS, 64)
        self.assertAlmostEqual(ratio, 0.4545, places=4)
        with self.assertRaises(CapacityError):
            ratio_for_concurrency(40 * GIB, COSTS, 205)

    def test_padding_slot(self):
        tiny = UnitCosts(
            kv_bytes_per_row=160,
            state_bytes_per_slot=19_200,
            state_slots_per_request=3,
        )
        self.assertEqual(size_pools(32 * MIB, 0.9, tiny), PoolSizes(110_475, 826))


class ProfileCase(CustomTestCase):
    """A folder with one profile."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def profile(self, **changes):
        fields = {
            "version": 1,
            "name": "agents",
            "trajectories": 40,
            "final_context_tokens": {"mean": 60_000},
            "forked_share": 0.0,
        }
        path = self.folder / "profile.json"
        path.write_text(json.dumps(fields | changes))
        return str(path)


class TestProfile(ProfileCase):
    def test_good(self):
        profile = load_workload_profile(self.profile())
        self.assertEqual(profile.mean_final_context, 60_000)

    def test_bad(self):
        for changes, message in (
            ({"version": 2}, "version is 2; it must be 1"),
            ({"trajectories": 0}, "trajectories is 0"),
            ({"final_context_tokens": {"mean": float("nan")}}, "mean is nan"),
            ({"final_context_tokens": {}}, "final_context_tokens is {}"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ProfileError, message):
                load_workload_profile(self.profile(**changes))

    def test_command_line(self):
        parser = argparse.ArgumentParser(prog="server")
        args = SimpleNamespace(hybrid_workload_profile=self.profile(version=2))
        error = io.StringIO()
        with contextlib.redirect_stderr(error), self.assertRaises(SystemExit) as stop:
            exit_on_bad_profile(parser, args)
        self.assertEqual(stop.exception.code, 2)
        self.assertEqual(error.getvalue().count("\n"), 1)


class TestEngine(ProfileCase):
    """The hooks on a published configuration."""

    def size(self):
        kvc = SimpleNamespace(
            pp_size=1,
            attn_dp_size=1,
            _calculate_mamba_ratio=lambda: 5,
            logical_token_capacity=lambda max_total_num_tokens: max_total_num_tokens,
        )
        with patch.object(
            hybrid_capacity_engine, "_kv_bytes_per_row", return_value=70 * KIB
        ):
            apply_hybrid_workload_profile(
                kvc,
                budget_gib=40.0,
                state_bytes=40 * MIB,
                extra_bytes_per_slot=0,
                fixed_state_bytes=0,
                keeps_draft_states=False,
            )

    @contextlib.contextmanager
    def published(self, asked=None, **fields):
        """A configuration with a profile; ``asked`` was on the command line."""
        config = get_context().override_server_args(
            hybrid_workload_profile=self.profile(), page_size=1, **fields
        )
        raw = patch.object(
            hybrid_capacity_engine, "_asked", side_effect=(asked or {}).get
        )
        with config, raw:
            yield

    def test_profile_sets_the_ratio(self):
        with self.published():
            self.size()
            expected = deployed_ratio(40 * GIB, COSTS, 60_000)
            self.assertEqual(get_schedule().mamba_full_memory_ratio, expected)
            self.assertEqual(ratio_origin(), "profile")

    def test_others_outrank_it(self):
        for asked, origin in (
            ({"mamba_full_memory_ratio": 0.7}, "flag"),
            ({"max_mamba_cache_size": 90}, "max_mamba_cache_size"),
        ):
            with self.subTest(origin), self.published(asked):
                self.size()
                self.assertEqual(ratio_origin(), origin)
                self.assertEqual(get_schedule().mamba_full_memory_ratio, 0.9)

    def test_report(self):
        with (
            self.published(max_mamba_cache_size=46),
            patch.object(hybrid_capacity_engine, "get_parallel") as parallel,
            self.assertLogs(hybrid_capacity_engine.logger, "INFO") as log,
        ):
            parallel.return_value.tp_rank = 0
            self.size()
            report = report_hybrid_capacity(kv_tokens=571_684, max_running_requests=9)
        self.assertEqual(report["reference_concurrency"], 9)
        self.assertEqual(report["binding_pool"], "state")
        self.assertIn("from the workload profile", log.output[0])

    def test_ranks_add_up(self):
        rank = {
            "ratio": 0.1,
            "kv_tokens": 10,
            "state_slots": 5,
            "kv_capacity": None,
            "state_capacity": 1.0,
            "reference_concurrency": 2,
            "reference_concurrency_continuous": 2.5,
            "max_running_requests": 4,
        }
        section = hybrid_capacity_section([{"hybrid_capacity": rank}] * 3)
        total = section["hybrid_capacity"]
        self.assertEqual(total["reference_concurrency"], 6)
        self.assertEqual(total["ratio"], 0.1)
        self.assertIsNone(total["kv_capacity"])
        self.assertEqual(hybrid_capacity_section([{}]), {})


class TestPlanner(ProfileCase):
    def test_unit_costs_of_a_config(self):
        (self.folder / "config.json").write_text(json.dumps(TINY_KIMI))
        model = read_model_costs(Deployment(model_path=str(self.folder)))
        self.assertEqual(model.costs.kv_bytes_per_row, (32 + 8) * 2)
        self.assertEqual(
            model.costs.state_bytes_per_slot,
            3 * (3 * 3 * 4 * 16 * 2 + 4 * 16 * 16 * 4),
        )
        self.assertEqual(model.costs.state_slots_per_request, 5)

    def test_command_line(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = plan_hybrid_cache(
                [
                    *("--kv-bytes-per-token", "70KiB"),
                    *("--state-bytes-per-slot", "40MiB"),
                    *("--state-slots-per-request", "5"),
                    *("--workload-profile", self.profile()),
                    *("--cache-memory-gb", "40"),
                    "--json",
                ]
            )
        plan = json.loads(output.getvalue())
        self.assertEqual(code, 0)
        self.assertEqual(plan["reference_concurrency"], 9)
        self.assertEqual(plan["binding_pool_at_default"], "kv")


if __name__ == "__main__":
    unittest.main()
