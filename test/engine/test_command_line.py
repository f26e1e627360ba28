"""The command line of the engine: what it offers, and one line for what it refuses."""

import argparse
import socket
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # upstream's, at import
]


@pytest.fixture(scope="module")
def server_args() -> Any:
    from sglang.srt import server_args

    return server_args


def refuse(
    server_args: Any, capsys: pytest.CaptureFixture[str], *flags: str
) -> list[str]:
    """Lines of the error of a refused command; its status must be 2."""
    with pytest.raises(SystemExit) as ended:
        server_args.prepare_server_args(["--model-path", "none", *flags])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line and not line.startswith(("usage:", " "))]


def test_help_offers_routing_prefix(server_args: Any) -> None:
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    policies = next(
        action for action in parser._actions if action.dest == "schedule_policy"
    )
    assert "routing-prefix" in policies.choices
    assert "routing-prefix" in parser.format_help()


def test_an_unknown_policy_is_refused_in_one_line(
    server_args: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = refuse(server_args, capsys, "--schedule-policy", "nonsense")
    assert "--schedule-policy: invalid choice: 'nonsense' (choose from" in line
    assert "routing-prefix" in line


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--routing-prefix-capacity", "0"], "--routing-prefix-capacity: 0 is not"),
        (["--routing-prefix-overtake-limit", "-1"], "overtake-limit: -1 is negative"),
        (["--enable-priority-scheduling"], "with --enable-priority-scheduling"),
        (["--dllm-algorithm", "LowConfidence"], "with --dllm-algorithm"),
    ],
)
def test_what_routing_prefix_cannot_do_is_refused_in_one_line(
    server_args: Any,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    expected: str,
) -> None:
    (line,) = refuse(server_args, capsys, "--schedule-policy", "routing-prefix", *flags)

    assert expected in line


def test_a_taken_port_is_refused_in_one_line(
    server_args: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = str(owner.getsockname()[1])
        (line,) = refuse(server_args, capsys, "--port", port)
    assert f"--port: {port} is in use on 127.0.0.1" in line
