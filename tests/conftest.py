"""Settings of every test."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A busy machine is slow without being wrong, so nothing has a deadline. In CI the examples are the same each time: a
# change is judged by what it changes. Elsewhere they are new ones, which is how the odd case is found.
settings.register_profile("kvtriage", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("kvtriage")

# Threads of torch that wait for each other sleep, as they do under the command: on a busy machine two that spin are
# many times slower than one. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a shell starts in the background ignores Ctrl-C, and so would all that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
