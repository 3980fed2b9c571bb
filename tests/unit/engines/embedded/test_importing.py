"""What importing transformers brings along, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_REPORT = """
import sys
from kvtriage.engines.embedded.importing import import_transformers
{before}
import_transformers()
import transformers
transformers.LlamaForCausalLM
print("scipy.optimize" in sys.modules, transformers.utils.is_scipy_available())
import scipy.special
print(scipy.special.gamma(5.0))
"""


def said(before: str = "") -> list[str]:
    code = _REPORT.format(before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_a_model_is_loaded_without_scipy_and_others_find_it() -> None:
    assert said() == ["False", "False", "24.0"]


def test_a_scipy_that_was_there_before_stays_the_same() -> None:
    lines = [
        "import atexit",
        "import scipy.special",
        "first = scipy.special",
        "atexit.register(lambda: print(first is sys.modules['scipy.special']))",
    ]
    assert said("\n".join(lines)) == ["False", "False", "24.0", "True"]


def test_a_thread_that_imports_scipy_meanwhile_gets_it() -> None:
    lines = [
        "import threading",
        "found = []",
        "def imports():",
        "    import scipy.stats",
        "    found.append(scipy.stats)",
        "thread = threading.Thread(target=imports)",
        "thread.start()",
        "import atexit",
        "atexit.register(lambda: print(len(found), 'scipy' in sys.modules))",
    ]
    assert said("\n".join(lines))[2:] == ["24.0", "1", "True"]
