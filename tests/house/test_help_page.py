from __future__ import annotations

import subprocess
import sys

from tests.house.help_page import PAGE

ROOT = PAGE.parents[2]


def test_the_page_says_what_the_commands_say() -> None:
    """Write it anew with: python -m tests.house.help_page

    In a process of its own: a command that was once called without its group keeps the help option of that call.
    """
    program = "import tests.house.help_page as page; print(page.render(), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text()
