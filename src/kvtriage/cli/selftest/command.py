"""selftest: the command."""

from __future__ import annotations

import platform

import click

from kvtriage import __version__
from kvtriage.cli.selftest.checks import Check, Status, render_checks
from kvtriage.cli.selftest.installed import (
    COMPANIONS,
    NEEDED,
    check_companion,
    check_demo,
    check_distribution,
    check_http,
    check_vllm,
)
from kvtriage.cli.selftest.machine import (
    check_cache,
    check_cpu,
    check_engine,
    check_memory,
    check_threads,
    compare_decode,
    compare_e4m3,
    start_engine,
)
from kvtriage.errors import EngineError

__all__ = ["selftest_command"]


@click.command("selftest")
def selftest_command() -> int:
    """Check the installation: exit code 0 when the main job can run here, 4 when not.

    \b
    Example:
      kvtriage selftest
    """
    checks = _run_checks()
    click.echo(render_checks(checks))
    return EngineError.exit_code if any(check.status is Status.MISSING for check in checks) else 0


def _run_checks() -> list[Check]:
    checks = [Check("kvtriage", Status.OK, __version__), Check("python", Status.OK, platform.python_version())]
    checks += [check_distribution(name, least) for name, least in NEEDED.items()]
    checks += [check_companion(name) for name in COMPANIONS]
    checks += [
        check_engine("embedded engine", start_engine),
        check_engine("E4M3 conversion", compare_e4m3),
        check_engine("decode attention", compare_decode),
        check_cpu(),
        *check_threads(),
        check_memory(),
    ]
    return [*checks, *check_cache(), *check_demo(), check_http(), check_vllm()]
