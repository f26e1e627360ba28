"""The ring against smg's own answers and against an independent BLAKE3."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_router.policies import HashRing, make_policy
from sgl_router.policies.ring import ring_position

RECORDED = json.loads((Path(__file__).parent / "data/smg_homes.json").read_text())

IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
    0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
CHUNK_START, CHUNK_END, ROOT = 1, 2, 8


def rotate(word: int, by: int) -> int:
    return (word >> by | word << (32 - by)) & 0xFFFFFFFF


def mix(v: list[int], at: tuple[int, ...], x: int, y: int) -> None:
    a, b, c, d = at
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        v[a] = (v[a] + v[b] + word) & 0xFFFFFFFF
        v[d] = rotate(v[d] ^ v[a], first)
        v[c] = (v[c] + v[d]) & 0xFFFFFFFF
        v[b] = rotate(v[b] ^ v[c], second)


def compress(chain: tuple[int, ...], block: bytes, flags: int) -> tuple[int, ...]:
    words = struct.unpack("<16I", block.ljust(64, b"\0"))
    v = [*chain, *IV[:4], 0, 0, len(block), flags]
    for _ in range(7):
        for i, at in enumerate((*COLUMNS, *DIAGONALS)):
            mix(v, at, words[2 * i], words[2 * i + 1])
        words = tuple(words[i] for i in PERMUTATION)
    return tuple(v[i] ^ v[i + 8] for i in range(8))


def blake3_position(text: str) -> int:
    """First 8 bytes, little-endian, of BLAKE3 over at most 1024 bytes: one chunk."""
    data = text.encode()
    blocks = [data[i : i + 64] for i in range(0, len(data), 64)] or [b""]
    chain: tuple[int, ...] = IV
    for i, block in enumerate(blocks):
        flags = CHUNK_START * (i == 0)
        flags |= (CHUNK_END | ROOT) * (i == len(blocks) - 1)
        chain = compress(chain, block, flags)
    return chain[0] | chain[1] << 32


@given(st.text(st.characters(max_codepoint=126), max_size=300))
def test_positions_equal_an_independent_blake3(text):
    assert ring_position(text) == blake3_position(text)


def test_homes_equal_an_independent_ring():
    workers = RECORDED["sets"][0]["workers"]
    nodes = sorted(
        (blake3_position(f"{w}#{v}"), w) for w in workers for v in range(150)
    )
    for label in RECORDED["labels"][:40]:
        at = blake3_position(label)
        home = next((w for position, w in nodes if position >= at), nodes[0][1])
        assert HashRing(workers).order(label)[0] == home


@pytest.mark.parametrize("recorded", RECORDED["sets"], ids=lambda s: len(s["workers"]))
@pytest.mark.parametrize("policy", ["consistent_hashing", "lbch"])
def test_homes_equal_those_a_real_smg_gave(recorded, policy):
    workers = recorded["workers"]
    made = make_policy(policy, workers)
    homes = [
        workers.index(made.pick(label, dict.fromkeys(workers, 0)))
        for label in RECORDED["labels"]
    ]
    assert "".join(map(str, homes)) == recorded["homes"]


def test_gateways_agree_in_other_processes_with_other_hash_seeds():
    code = (
        "import json, sys; from sgl_router.policies import make_policy\n"
        "workers = [f'http://w{i}:80' for i in range(4)]\n"
        "policy = make_policy('lbch', workers[::int(sys.argv[1])])\n"
        "loads = dict.fromkeys(workers, 0)\n"
        "print(json.dumps([policy.pick(f'k{i}', loads) for i in range(200)]))"
    )
    homes = {
        subprocess.run(
            [sys.executable, "-c", code, order],
            check=True,
            capture_output=True,
            timeout=30,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed, order in (("1", "1"), ("2", "-1"), ("3", "1"))
    }
    assert len(homes) == 1


def test_virtual_nodes_spread_labels_evenly():
    workers = [f"http://w{i}:80" for i in range(8)]
    policy = make_policy("lbch", workers)
    homes = [policy.pick(f"k{i}", dict.fromkeys(workers, 0)) for i in range(4000)]
    shares = [homes.count(worker) / 4000 for worker in workers]
    assert min(shares) > 0.08
    assert max(shares) < 0.18


def test_shares_are_those_of_many_labels():
    workers = [f"http://w{i}:80" for i in range(3)]
    policy = make_policy("consistent_hashing", workers)
    loads = dict.fromkeys(workers, 0)
    homes = [policy.pick(f"label {i}", loads) for i in range(20_000)]
    shares = policy.home_shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    for worker in workers:
        assert homes.count(worker) / 20_000 == pytest.approx(shares[worker], abs=0.01)


def test_how_uneven_two_workers_are():
    """What docs/gateway.md and the docstring of shares say."""
    rings = [
        HashRing([f"http://10.0.{i}.{j}:30000" for j in (1, 2)]) for i in range(250)
    ]
    larger = sorted(max(ring.shares().values()) for ring in rings)
    assert sum(larger) / 250 == pytest.approx(0.523, abs=0.001)
    assert larger[225] == pytest.approx(0.5485, abs=0.001)


def test_labels_without_a_home_have_no_shares():
    assert make_policy("round_robin", ["http://w:80"]).home_shares() == {}
    assert HashRing([]).shares() == {}
