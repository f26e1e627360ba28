"""The policy lbch for smg: its patch, its code, and the vectors shared with ours.

What needs the pinned source archive or a Rust compiler skips without it. smg itself is
not compiled here: it needs a crate registry.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from patches.tools.errors import SeriesError

from sgl_router.policies import make_policy

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "gateway-patch"
POLICIES = FOLDER / "files/model_gateway/src/policies"
STUB = Path(__file__).parent / "smg_stub"


def load(name: str) -> ModuleType:
    """Import a script of the patch's folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


smg_patch = load("smg_patch")
make_vectors = load("make_vectors")


@pytest.fixture(scope="module")
def archive() -> Path:
    try:
        return smg_patch.fetch(smg_patch.read_archive())
    except SeriesError as error:
        if "pip download" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def pristine(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smg") / "source"
    smg_patch.unpack(archive, folder)
    return folder


def copied(pristine: Path, to: Path) -> Path:
    """The files that the patch touches, enough to apply it."""
    for file in smg_patch.load().files:
        (to / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pristine / file.path, to / file.path)
    return to


def vectors() -> list[list[str]]:
    text = (POLICIES / "bounded_consistent_hashing/vectors.txt").read_text("utf-8")
    return [line.split(" ") for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.slow
def test_the_vectors_are_what_the_generator_writes() -> None:
    text = (POLICIES / "bounded_consistent_hashing/vectors.txt").read_text("utf-8")
    assert "\n".join(make_vectors.lines()) + "\n" == text


@pytest.mark.slow
def test_the_python_policy_places_as_the_vectors() -> None:
    cases = vectors()
    assert len(cases) == 1000
    assert {case[4] for case in cases} == {"home", "spill"}
    for label, factor, gap, pick, branch, shown in cases:
        loads = {
            f"http://worker-{worker}:30000": int(load)
            for worker, load in enumerate(shown.split(","))
            if load != "-"
        }
        urls = [f"http://worker-{n}:30000" for n in range(shown.count(",") + 1)]
        policy = make_policy(
            "lbch", urls, load_factor=float(factor), balance_abs_threshold=float(gap)
        )
        assert policy.choose(label, loads) == (urls[int(pick)], branch), label


def test_the_patch_only_inserts_and_shows_no_text_of_smg() -> None:
    _, _, body = smg_patch.PATCH.read_text("utf-8").partition("\n\n")
    for line in body.splitlines():
        assert line.startswith(("+", "diff --git ", "index ", "--- a/", "@@ -"))
        assert not line.startswith("@@") or line.endswith("@@")


def test_every_added_flag_is_in_both_command_lines() -> None:
    text = smg_patch.PATCH.read_text("utf-8")
    for flag in ("lbch_load_factor", "lbch_balance_abs_threshold"):
        assert f"+    {flag}: " in text
        assert f"{{prefix}}{flag.replace('_', '-')}" in text


@pytest.mark.slow
def test_the_patch_applies_exactly(pristine: Path, tmp_path: Path) -> None:
    assert smg_patch.check() == []
    tree = copied(pristine, tmp_path / "smg")
    written = smg_patch.apply(tree)
    assert "model_gateway/src/policies/bounded_consistent_hashing.rs" in written
    with pytest.raises(SeriesError):
        smg_patch.apply(tree)  # not twice


@pytest.mark.slow
def test_another_source_is_refused_and_left_alone(
    pristine: Path, tmp_path: Path
) -> None:
    tree = copied(pristine, tmp_path / "smg")
    last = tree / smg_patch.load().files[-1].path
    last.write_text("# moved\n" + last.read_text("utf-8"), "utf-8")
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    with pytest.raises(SeriesError, match="the patch needs"):
        smg_patch.apply(tree)
    assert before == {p: p.read_bytes() for p in tree.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_a_refresh_of_the_patched_tree_changes_nothing(
    archive: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "smg"
    smg_patch.unpack(archive, tree)
    smg_patch.apply(tree)
    before = smg_patch.PATCH.read_bytes()
    smg_patch.refresh(tree)
    assert smg_patch.PATCH.read_bytes() == before


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rustfmt") is None, reason="no rustfmt here")
def test_rustfmt_has_nothing_to_say(pristine: Path, tmp_path: Path) -> None:
    tree = copied(pristine, tmp_path / "smg")
    for path in smg_patch.apply(tree):
        if path.endswith(".rs"):
            # From standard input, so that modules named in a file are not followed.
            text = (tree / path).read_bytes()
            command = ["rustfmt", "--edition", "2021", "--emit", "stdout"]
            done = subprocess.run(command, input=text, capture_output=True, check=True)
            assert done.stdout == text, path


@pytest.mark.slow
def test_the_patched_python_side_takes_the_flags(
    pristine: Path, tmp_path: Path
) -> None:
    """The parser is run as it is after the patch, with a stand-in for the binary."""
    tree = copied(pristine, tmp_path / "smg")
    smg_patch.apply(tree)
    package = tmp_path / "package" / "smg"
    shutil.copytree(pristine / "src/smg", package)
    for name in ("router.py", "router_args.py"):
        shutil.copyfile(tree / "src/smg" / name, package / name)
    (package / "smg_rs.py").write_text(
        "from unittest.mock import MagicMock\n\n\n"
        "def __getattr__(name):\n    return MagicMock(name=name)\n"
    )
    program = (
        "import argparse\n"
        "from smg.router_args import RouterArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "RouterArgs.add_cli_args(parser)\n"
        "words = '--policy lbch --lbch-load-factor 1.5 --lbch-balance-abs-threshold 2'\n"
        "args = RouterArgs.from_cli_args(parser.parse_args(words.split()))\n"
        "print(args.policy, args.lbch_load_factor, args.lbch_balance_abs_threshold)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=package.parent, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["lbch", "1.5", "2"], done.stderr


def policy_config(tree: Path) -> str:
    """The patched enum of policy settings and its names, without serde.

    The settings structs of smg's own policies are made from its variants, which carry
    the same fields; the kinds that fields are of have one value each.
    """
    text = (tree / "model_gateway/src/config/types.rs").read_text("utf-8")
    blocks = [
        re.search(rf"^{head} {{.*?^}}$", text, re.M | re.S)
        for head in ("pub enum PolicyConfig", "impl PolicyConfig")
    ]
    enum, names = (block.group() for block in blocks if block)
    enum = re.sub(r"^ *#\[serde\(.*?\)\]\n", "", enum, flags=re.M | re.S)
    lines = ["#[derive(Debug, Clone)]", enum, names]
    for variant in ("CacheAware", "Bucket", "Manual", "PrefixHash"):
        body = re.search(rf"^    {variant} {{\n(.*?)^    }},", enum, re.M | re.S)
        assert body is not None
        fields = re.findall(r"^        (\w+: .+,)$", body.group(1), re.M)
        lines.append(
            f"pub struct {variant}Config {{ {' '.join(f'pub {f}' for f in fields)} }}"
        )
    for kind in ("CacheIndexKind", "PowerOfTwoLoadMetric", "ManualAssignmentMode"):
        lines.append("#[derive(Debug, Clone, Copy, Default)]")
        lines.append(f"pub enum {kind} {{ #[default] Only }}")
    return "\n".join(lines) + "\n"


def lay_out_crate(pristine: Path, tree: Path, crate: Path) -> None:
    """The patched sources that compile without other crates, and our stand-ins."""
    for name in ("lib.rs", "other_policies.rs"):
        folder = crate if name == "lib.rs" else crate / "policies"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(STUB / name, folder / name)
    source = tree / "model_gateway/src"
    shutil.copytree(POLICIES, crate / "policies", dirs_exist_ok=True)
    factory = (source / "policies/factory.rs").read_text("utf-8")
    factory = factory.replace("#[tokio::test]\n    async fn", "#[test]\n    fn")
    (crate / "policies/factory.rs").write_text(factory)
    (crate / "config.rs").write_text(policy_config(tree))
    (crate / "worker").mkdir()
    ring = "model_gateway/src/worker/hash_ring.rs"
    shutil.copyfile(pristine / ring, crate / "worker/hash_ring.rs")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rustc") is None, reason="no Rust compiler here")
def test_the_rust_policy_its_configuration_and_the_factory_compile_and_pass(
    pristine: Path, tmp_path: Path
) -> None:
    """With smg's real hash ring, and stand-ins for the rest of smg."""
    tree = copied(pristine, tmp_path / "smg")
    smg_patch.apply(tree)
    crate = tmp_path / "crate"
    crate.mkdir()
    lay_out_crate(pristine, tree, crate)
    rustc = ["rustc", "--edition", "2021", "-O", "-D", "warnings"]
    for name in ("blake3", "openai_protocol"):
        library = ["--crate-type", "rlib", "--crate-name", name, f"{STUB}/{name}.rs"]
        subprocess.run([*rustc, *library], cwd=crate, check=True)
    extern = ["--extern", "blake3=libblake3.rlib"]
    extern += ["--extern", "openai_protocol=libopenai_protocol.rlib"]
    test = [*rustc, "--test", "-L", ".", *extern, "lib.rs", "-o", "policy_tests"]
    subprocess.run(test, cwd=crate, check=True)
    done = subprocess.run(
        ["./policy_tests", "policies::"],
        cwd=crate,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "10 passed; 0 failed" in done.stdout
    assert "picks_are_those_of_the_shared_vectors ... ok" in done.stdout
    assert "policies::factory::tests::test_create_by_name ... ok" in done.stdout
