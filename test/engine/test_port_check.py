"""A taken port is refused before a model is loaded."""

import argparse
import socket
from types import ModuleType

import pytest

from .conftest import load_file
from .engine_server import free_port


@pytest.fixture(scope="module")
def port_check() -> ModuleType:
    return load_file("srt/entrypoints/port_check.py")


def test_a_free_port_is_no_problem(port_check: ModuleType) -> None:
    assert port_check.find_problem("127.0.0.1", free_port()) is None


def test_a_taken_port_ends_the_command_with_one_line(
    port_check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        parser = argparse.ArgumentParser(prog="serve")
        args = argparse.Namespace(host="127.0.0.1", port=port, node_rank=0)
        with pytest.raises(SystemExit) as ended:
            port_check.exit_on_problem(parser, args)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"serve: error: --port: {port} is in use on 127.0.0.1; "
        "stop its owner or choose another\n"
    )


def test_only_the_first_node_listens(port_check: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        args = argparse.Namespace(host="127.0.0.1", port=port, node_rank=1)
        port_check.exit_on_problem(argparse.ArgumentParser(), args)


def test_a_host_that_cannot_be_bound_is_left_to_the_server(
    port_check: ModuleType,
) -> None:
    assert port_check.find_problem("203.0.113.1", 80) is None
