"""Servers that are started apart count only host memory that no other has counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pariskv_core.serving import HostShare

pytestmark = pytest.mark.cpu("files alone")


def test_others_are_left_what_they_have_promised_and_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "shares"
    plan, first, second = (HostShare("a", part, folder) for part in ("plan", "0", "1"))
    other = HostShare("b", "plan", folder)
    assert other.of_others() == 0
    plan.promise(100)
    assert (other.of_others(), plan.of_others()) == (100, 0)
    first.take(30)
    second.take(20)
    assert other.of_others() == 50
    first.take(90)  # more than was counted: none of it is free
    assert other.of_others() == 0
    other.promise(7)
    assert HostShare("a", "0", folder).of_others() == 7
    assert HostShare("c", "plan", folder).of_others() == 7


def test_a_process_that_is_gone_promises_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "shares"
    program = (
        "import sys; from pathlib import Path; "
        "from pariskv_core.serving import HostShare; "
        "HostShare('gone', 'plan', Path(sys.argv[1])).promise(100)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    assert len(list(folder.glob("*.json"))) == 1
    assert HostShare("here", "plan", folder).of_others() == 0
    assert list(folder.glob("*.json")) == [], "its file is removed"
    HostShare("here", "plan", folder).promise(5)
    [path] = folder.glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "started": "0"}))  # its number is another's by now
    assert HostShare("other", "plan", folder).of_others() == 0


def test_a_folder_that_others_can_write_to_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "shares"
    HostShare("a", "plan", folder).promise(100)
    folder.chmod(0o777)
    assert HostShare("b", "plan", folder).of_others() == 0
    folder.chmod(0o700)
    assert HostShare("b", "plan", folder).of_others() == 100
    (folder / f"{os.getpid()}-bad.json").write_text("[")
    assert HostShare("b", "plan", folder).of_others() == 100
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    HostShare("a", "plan", link).promise(100)
    assert list(target.iterdir()) == []
