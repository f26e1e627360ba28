"""Unit tests for the routing-prefix scheduling policy."""

import argparse
import contextlib
import io
import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.managers.routing_prefix import (
    LabelSet,
    RoutingPrefix,
    falls_back_to_fcfs,
    is_valid_label,
    label_of,
)
from sglang.srt.managers.routing_prefix_args import (
    check_args,
    exit_on_problem,
    find_problem,
    resolve_settings,
    routing_prefix_section,
)
from sglang.srt.managers.routing_prefix_match import _needed_limit
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


def make_req(name, label=None, cached=0, **fields):
    defaults = {
        "rid": name,
        "routing_key": label,
        "session": None,
        "session_id": None,
        "routing_prefix_entry": None,
        "retraction_count": 0,
        "num_matched_prefix_tokens": cached,
        "cached": cached,
    }
    return SimpleNamespace(**(defaults | fields))


class Queue:
    """A waiting queue under the policy; counts the prefix queries."""

    def __init__(self, capacity, overtake_limit=None):
        self.policy = RoutingPrefix(capacity, overtake_limit)
        self.waiting = []
        self.queries = 0

    def _prefix_hit(self, req):
        self.queries += 1
        return req.cached

    def run_pass(self, admit, *new):
        self.waiting += new
        self.policy.sort(self.waiting, self._prefix_hit)
        admitted, self.waiting = self.waiting[:admit], self.waiting[admit:]
        self.policy.admit(admitted)
        return [req.rid for req in admitted]

    def serve(self, *labels):
        """Make these labels the recently admitted ones, in this order."""
        for label in labels:
            served = [make_req(f"first-{label}", label)]
            self.policy.sort(served, self._prefix_hit)
            self.policy.admit(served)

    def count(self, name):
        return self.policy.counters[name]


class TestOrder(CustomTestCase):
    def test_recent_labels_go_first_longest_hit_first(self):
        queue = Queue(capacity=2)
        queue.serve("C", "B", "A")

        order = queue.run_pass(
            7,
            make_req("unlabelled", None, 400),
            make_req("new", "D", 400),
            make_req("B", "B", 100),
            make_req("A", "A", 300),
            make_req("dropped", "C", 200),
            make_req("empty", "", 400),
            make_req("A again", "A", 50),
        )

        self.assertEqual(
            order, ["A", "B", "A again", "unlabelled", "new", "dropped", "empty"]
        )
        self.assertEqual(queue.queries, 3)

    def test_equal_hits_keep_the_order_of_entry(self):
        queue = Queue(capacity=4)
        queue.serve("A", "B")

        queue.run_pass(0, make_req("1", "B", 10), make_req("2", "A", 10))

        self.assertEqual(queue.run_pass(3, make_req("3", "A", 10)), ["1", "2", "3"])

    def test_without_recent_labels_it_is_fcfs(self):
        queue = Queue(capacity=4)

        order = queue.run_pass(3, *(make_req(str(i), str(i), i) for i in range(3)))

        self.assertEqual(order, ["0", "1", "2"])
        self.assertEqual(queue.queries, 0)

    def test_a_recorded_hit_is_reused_even_when_stale(self):
        queue = Queue(capacity=4)
        queue.serve("A", "B")
        long, short = make_req("long", "A", 90), make_req("short", "B", 40)
        queue.run_pass(0, long, short)
        long.cached = long.num_matched_prefix_tokens = 0

        self.assertEqual(queue.run_pass(2), ["long", "short"])
        self.assertEqual(queue.queries, 2)
        self.assertEqual(queue.count("stale_hits"), 1)
        self.assertEqual(queue.count("stale_tokens"), 90)

    def test_a_label_that_left_the_set_loses_the_first_tier(self):
        queue = Queue(capacity=1)
        queue.serve("A")
        queue.run_pass(0, make_req("other", None), make_req("was A", "A", 90))
        self.assertEqual([r.rid for r in queue.waiting], ["was A", "other"])
        queue.policy.admit([queue.waiting.pop()])
        queue.serve("B")

        self.assertEqual(queue.run_pass(2, make_req("late", "B", 1))[0], "late")
        self.assertEqual(queue.count("admitted_first_tier"), 1)

    def test_a_returning_turn_passes_a_cold_long_prompt(self):
        queue = Queue(capacity=4)
        queue.serve("warm")

        order = queue.run_pass(
            3,
            make_req("cold 30k", "cold"),
            make_req("returning", "warm", 20_000),
            make_req("cold too", "cold2"),
        )

        self.assertEqual(order, ["returning", "cold 30k", "cold too"])

    def test_a_retracted_request_enters_anew(self):
        queue = Queue(capacity=4)
        queue.serve("A")
        req = make_req("A", "A", 10)
        queue.run_pass(1, req)
        req.retraction_count = 1

        queue.run_pass(0, make_req("B", "A", 10), req)

        self.assertEqual([r.rid for r in queue.waiting], ["B", "A"])
        self.assertEqual(queue.queries, 3)
        self.assertEqual(queue.count("labelled"), 3)

    def test_a_yielded_prefill_may_return_to_the_front(self):
        queue = Queue(capacity=4)
        queue.run_pass(0, make_req("waiting"))
        queue.waiting.insert(0, make_req("yielded"))

        self.assertEqual(queue.run_pass(2), ["waiting", "yielded"])

    def test_an_aborted_request_is_forgotten(self):
        queue = Queue(capacity=4)
        queue.serve("A")
        queue.run_pass(0, make_req("gone", "B", 9), make_req("stays", "A", 5))
        queue.waiting = [req for req in queue.waiting if req.rid != "gone"]
        queue.serve("B")

        self.assertEqual(queue.run_pass(2), ["stays"])

    def test_a_continued_chunk_is_not_admitted_again(self):
        queue = Queue(capacity=2)
        chunked = make_req("chunked", "A")
        queue.run_pass(1, chunked)
        queue.serve("B", "C")

        queue.policy.admit([chunked])

        self.assertEqual(list(queue.policy.labels), ["B", "C"])


class TestCost(CustomTestCase):
    def test_one_query_per_request_at_any_queue_length(self):
        for waiting in (20, 128, 129, 400):
            with self.subTest(waiting=waiting):
                queue = Queue(capacity=64)
                queue.serve(*(f"r{i}" for i in range(20)))
                reqs = [make_req(f"cold{i}", f"c{i}") for i in range(waiting - 20)]
                recent = [make_req(f"r{i}", f"r{i}", 10 + i) for i in range(20)]

                queue.run_pass(0, *reqs, *recent)
                self.assertEqual(queue.queries, 20)
                queue.run_pass(0)
                self.assertEqual(queue.queries, 20)

                front = [req.rid for req in queue.waiting[:20]]
                self.assertEqual(front, [f"r{i}" for i in reversed(range(20))])

    def test_saved_queries_are_those_of_matching_everything(self):
        queue = Queue(capacity=4)
        queue.serve("A")
        before = queue.count("prefix_queries_saved")

        queue.run_pass(0, make_req("A", "A", 1), make_req("B", "B"))
        queue.run_pass(0)

        self.assertEqual(queue.count("prefix_queries"), 1)
        self.assertEqual(queue.count("prefix_queries_saved") - before, 3)


class TestLimitOfAMatch(CustomTestCase):
    def test_a_limit_is_left_out_only_where_it_changes_no_page(self):
        for page_size in (1, 4):
            for length in range(1, 20):
                for limit in range(length):
                    if _needed_limit(length, limit, page_size) is not None:
                        continue
                    for pair in (0, 1):
                        self.assertEqual(
                            (limit - pair) // page_size, (length - pair) // page_size
                        )

    def test_most_prompts_of_large_pages_need_none(self):
        limits = [_needed_limit(n, n - 1, 64) for n in range(1000, 1064)]

        self.assertEqual(limits.count(None), 62)
        self.assertEqual(_needed_limit(1024, 1023, 64), 1023)
        self.assertEqual(_needed_limit(1025, 700, 64), 700)


class TestOvertakeLimit(CustomTestCase):
    def run_hot(self, limit):
        """Let one new hot request arrive in each pass and admit one in each."""
        queue = Queue(capacity=4, overtake_limit=limit)
        queue.serve("hot")
        admitted = queue.run_pass(1, make_req("cold"), make_req("hot0", "hot", 9))
        for i in range(1, 200):
            admitted += queue.run_pass(1, make_req(f"hot{i}", "hot", 9))
        return admitted

    def test_a_cold_request_is_admitted_once_the_limit_is_reached(self):
        self.assertEqual(self.run_hot(limit=50).index("cold"), 50)

    def test_without_a_limit_the_order_is_the_policys(self):
        self.assertNotIn("cold", self.run_hot(limit=None))

    def test_zero_means_fcfs(self):
        self.assertEqual(self.run_hot(limit=0)[:3], ["cold", "hot0", "hot1"])

    def test_the_limit_holds_within_one_batch(self):
        queue = Queue(capacity=4, overtake_limit=2)
        queue.serve("hot")
        hot = [make_req(f"hot{i}", "hot", 9) for i in range(4)]

        order = queue.run_pass(5, make_req("cold"), *hot)

        self.assertEqual(order, ["hot0", "hot1", "cold", "hot2", "hot3"])


class TestLabels(CustomTestCase):
    def test_the_least_recent_label_is_dropped(self):
        labels = LabelSet(2)

        changes = [labels.touch(label) for label in ("A", "B", "A", "C")]

        self.assertEqual(list(labels), ["A", "C"])
        self.assertEqual(changes, [["A"], ["B"], [], ["C", "B"]])

    def test_the_routing_key_comes_before_the_session(self):
        session = SimpleNamespace(session_id="s")

        self.assertEqual(label_of(make_req("r", "key", session=session)), "key")
        self.assertEqual(label_of(make_req("r", "", session=session)), "s")
        self.assertEqual(label_of(make_req("r", session_id="t")), "t")
        self.assertIsNone(label_of(make_req("r", session_id="")))

    def test_a_label_is_visible_ascii_of_128_bytes(self):
        self.assertTrue(is_valid_label("x" * 128))
        for label in ("x" * 129, "two words", "tab\t", "é", "\x7f"):
            self.assertFalse(is_valid_label(label), label)

    def test_counts_by_kind_of_label(self):
        queue = Queue(capacity=4)

        queue.run_pass(
            0,
            make_req("a", "A"),
            make_req("b"),
            make_req("c", "two words"),
            make_req("HEALTH_CHECK_1"),
        )

        self.assertEqual(queue.count("labelled"), 1)
        self.assertEqual(queue.count("unlabelled"), 2)
        self.assertEqual(queue.count("invalid_labels"), 1)

    def test_passes_without_an_admission_are_counted(self):
        queue = Queue(capacity=4)

        queue.run_pass(0, make_req("too long"))
        queue.run_pass(0)
        queue.run_pass(1)

        self.assertEqual(queue.count("blocked_passes"), 2)


class TestArguments(CustomTestCase):
    def args(self, **fields):
        defaults = {
            "schedule_policy": "routing-prefix",
            "routing_prefix_capacity": None,
            "routing_prefix_overtake_limit": None,
            "enable_priority_scheduling": False,
            "dllm_algorithm": None,
        }
        return SimpleNamespace(**(defaults | fields))

    def test_good_settings_pass(self):
        self.assertIsNone(find_problem(self.args()))
        self.assertIsNone(find_problem(self.args(routing_prefix_capacity=1)))
        self.assertIsNone(find_problem(self.args(routing_prefix_overtake_limit=0)))

    def test_a_problem_is_one_line_with_flag_and_value(self):
        cases = (
            ({"routing_prefix_capacity": 0}, "--routing-prefix-capacity: 0 "),
            ({"routing_prefix_overtake_limit": -1}, "overtake-limit: -1 "),
            ({"enable_priority_scheduling": True}, "with --enable-priority-scheduling"),
            ({"dllm_algorithm": "x"}, "with --dllm-algorithm"),
        )
        for fields, message in cases:
            with self.subTest(message=message):
                problem = find_problem(self.args(**fields))
                self.assertIn(message, problem)
                self.assertNotIn("\n", problem)
                with self.assertRaisesRegex(ValueError, message):
                    check_args(self.args(**fields))

    def test_the_command_line_answers_with_one_line(self):
        parser = argparse.ArgumentParser(prog="sglang serve")
        errors = io.StringIO()

        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as exit_:
            exit_on_problem(parser, self.args(routing_prefix_capacity=-3))

        self.assertEqual(exit_.exception.code, 2)
        self.assertEqual(
            errors.getvalue(),
            "sglang serve: error: --routing-prefix-capacity: -3 is not a positive "
            "integer\n",
        )

    def resolve(self, given, published, max_running_requests):
        """Resolve with a flag, and with what sizing published over it."""
        module = "sglang.srt.managers.routing_prefix_args"
        args = SimpleNamespace(routing_prefix_capacity=given)
        schedule = SimpleNamespace(
            routing_prefix_capacity=published, routing_prefix_overtake_limit=None
        )
        with (
            patch(f"{module}.get_context", lambda: SimpleNamespace(server_args=args)),
            patch(f"{module}.get_schedule", lambda: schedule),
        ):
            return resolve_settings(max_running_requests)

    def test_the_capacity_says_where_it_comes_from(self):
        for given, published, expected in (
            (None, None, (18, "max_running_requests")),
            (None, 5, (5, "reference_concurrency")),
            (3, 3, (3, "flag")),
        ):
            with self.subTest(expected=expected):
                settings = self.resolve(given, published, 9)
                found = (settings.capacity, settings.capacity_origin)
                self.assertEqual(found, expected)

    def test_a_scheduler_that_runs_nothing_has_no_capacity(self):
        for running in (0, None):
            with self.assertRaisesRegex(
                ValueError, f"routing_prefix_capacity: {running}"
            ):
                self.resolve(None, None, running)

    def test_flags_without_the_policy_are_named_in_a_warning(self):
        args = self.args(schedule_policy="lpm", routing_prefix_capacity=4)

        with self.assertLogs(level="WARNING") as logs:
            check_args(args)

        self.assertIn("--routing-prefix-capacity has no effect", logs.output[0])

    def test_without_a_prefix_cache_it_falls_back(self):
        with self.assertLogs(level="WARNING") as logs:
            self.assertTrue(falls_back_to_fcfs("routing-prefix", True))

        self.assertIn("falling back to fcfs", logs.output[0])
        self.assertFalse(falls_back_to_fcfs("routing-prefix", False))
        self.assertFalse(falls_back_to_fcfs("lpm", True))

    def test_server_info_adds_up_the_ranks(self):
        first, second = RoutingPrefix(4), RoutingPrefix(4)
        first.counters["labelled"], second.counters["labelled"] = 2, 3
        first.counters["admitted_first_tier"] = 3
        second.counters["admitted_second_tier"] = 1
        states = [{"routing_prefix": rank.snapshot()} for rank in (first, second)]

        section = routing_prefix_section(states)["routing_prefix"]

        self.assertEqual(section["labelled"], 5)
        self.assertEqual(section["capacity"], 8)
        self.assertEqual(section["capacity_origin"], "flag")
        self.assertEqual(section["first_tier_share"], 0.75)

    def test_server_info_before_the_first_admission(self):
        section = routing_prefix_section(
            [{"routing_prefix": RoutingPrefix(4).snapshot()}]
        )

        self.assertIsNone(section["routing_prefix"]["first_tier_share"])

    def test_server_info_of_another_policy(self):
        self.assertEqual(routing_prefix_section([{"other": 1}]), {})


if __name__ == "__main__":
    unittest.main()
