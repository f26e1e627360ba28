"""Trees: exact, updatable, and never a place where edits or half a series get lost."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from patches.tools.errors import SeriesError
from patches.tools.pin import read_pin
from patches.tools.tree import apply_to, make_tree
from patches.tools.wheel import build_wheel, fetch

from .conftest import Project, insert_after

A = "sglang/srt/a.py"


def files_of(tree: Path) -> dict[str, bytes]:
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and path.name != ".makespan-tree.json"
    }


def unpack(project: Project) -> Path:
    """Return a folder that holds the unpatched wheel."""
    tree = project.root.parent / "stock"
    with zipfile.ZipFile(fetch(read_pin(project.root))) as archive:
        archive.extractall(tree)
    return tree


def test_a_tree_holds_what_the_wheel_holds(patched: Project) -> None:
    with zipfile.ZipFile(build_wheel(patched.root / "dist", root=patched.root)) as z:
        packed = {name: z.read(name) for name in z.namelist()}

    assert files_of(patched.tree()) == packed


def test_links_make_edits_of_our_files_take_effect(patched: Project) -> None:
    tree = patched.root.parent / "linked"
    make_tree(tree, link=True, root=patched.root)

    patched.write("python/sglang/srt/ours.py", "changed = 1\n")

    assert (tree / "sglang/srt/ours.py").read_text() == "changed = 1\n"
    assert not (tree / A).is_symlink()


def test_an_update_touches_only_what_differs(patched: Project) -> None:
    tree = patched.tree("alpha/high.patch")
    stamp = (tree / "sglang/srt/b.py").stat().st_mtime_ns
    patched.write("python/sglang/local/new.py", "new = 1\n")
    (patched.root / "python/sglang/local/page.txt").unlink()

    make_tree(tree, link=True, root=patched.root)

    assert "end = 1" in (tree / A).read_text()
    assert (tree / "sglang/local/new.py").is_symlink()
    assert not (tree / "sglang/local/page.txt").exists()
    assert (tree / "sglang/srt/b.py").stat().st_mtime_ns == stamp


def test_an_update_keeps_an_edit(patched: Project) -> None:
    tree = patched.tree()
    insert_after(tree / A, "a9 = 9", "edit = 1")

    with pytest.raises(SeriesError, match=r"a\.py: edited since the tree was made"):
        patched.tree("alpha/high.patch")

    assert "edit = 1\n" in (tree / A).read_text()


def test_another_folder_is_left_alone(patched: Project, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")

    with pytest.raises(SeriesError, match="not a tree made by the 'tree' command"):
        make_tree(tmp_path / "other", root=patched.root)


def test_an_unknown_patch_is_named(patched: Project) -> None:
    with pytest.raises(SeriesError, match=r"'alpha/no.patch' is not listed"):
        patched.tree("alpha/no.patch")


def test_apply_patches_an_unpacked_wheel_in_place(patched: Project) -> None:
    tree = unpack(patched)

    written = apply_to(tree, patched.root)

    assert written == ["sglang/local/page.txt", A, "sglang/srt/ours.py"]
    assert (tree / A).read_bytes() == (patched.tree() / A).read_bytes()


def test_a_second_apply_writes_nothing(patched: Project) -> None:
    tree = unpack(patched)
    apply_to(tree, patched.root)
    before = files_of(tree)

    with pytest.raises(SeriesError, match=r"high.patch: python/sglang/srt/a.py"):
        apply_to(tree, patched.root)

    assert files_of(tree) == before


def test_apply_to_a_changed_file_writes_nothing(patched: Project) -> None:
    tree = unpack(patched)
    (tree / A).write_text("shifted = 1\n" + (tree / A).read_text())
    before = files_of(tree)

    with pytest.raises(SeriesError, match="another upstream, or patches out of order"):
        apply_to(tree, patched.root)

    assert files_of(tree) == before


def test_apply_in_the_wrong_order_writes_nothing(patched: Project) -> None:
    tree = unpack(patched)
    patched.write(
        "patches/series", "alpha/low.patch\nalpha/high.patch\nbeta/end.patch\n"
    )
    before = files_of(tree)

    with pytest.raises(SeriesError, match=r"alpha/low.patch: .* patches out of order"):
        apply_to(tree, patched.root)

    assert files_of(tree) == before


def test_apply_never_overwrites(patched: Project) -> None:
    tree = unpack(patched)
    (tree / "sglang/srt/ours.py").write_text("theirs\n")

    with pytest.raises(SeriesError, match="upstream has a file there"):
        apply_to(tree, patched.root)

    assert (tree / "sglang/srt/ours.py").read_text() == "theirs\n"


def test_apply_needs_a_tree(patched: Project, tmp_path: Path) -> None:
    with pytest.raises(SeriesError, match="no folder 'sglang' in it"):
        apply_to(tmp_path, patched.root)
