"""Variables of a server's environment, as `--server-env` names them: NAME=VALUE, seen by everybody and recorded.

vLLM reads some of what decides a measurement from there alone, the layout of its cache among it. So variables are
conditions as arguments are: they stand in records and in the commands that are shown, and no secret may be one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from kvtriage.engines.vllm.server import KEY_VARIABLE
from kvtriage.errors import StudyError

__all__ = ["NATIVE_VARIABLE", "read_variables", "show_variables"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIALS?|COOKIE|AUTH|AUTHORIZATION|BEARER)"
    r"(?:_(?!THRESHOLD)|$)"
)
"""A part of a name that ends so: HF_TOKEN, APIKEY_FILE, PGPASS; not TOKENIZERS_PARALLELISM, nor vLLM's
..._TOKEN_THRESHOLD."""
_TOKEN = re.compile(r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abp]-)[\w-]{16}|^(?:bearer|basic) ", re.IGNORECASE)
"""What tokens of hubs and gateways begin with, whatever name they stand under."""
NATIVE_VARIABLE = "KVTRIAGE_CPU_NATIVE_DTYPE"
"""What kvtriage-vllm-cpu stores unquantised layers of a float32 model in."""
_OURS = ("PYTHONPATH", "VLLM_SERVER_DEV_MODE", KEY_VARIABLE, NATIVE_VARIABLE)
"""Without which the extension is not found, or not asked, or arms differ in more than their policies."""


def read_variables(words: Sequence[str]) -> dict[str, str]:
    """Each `--server-env NAME=VALUE`. Raises StudyError, and repeats no value."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise StudyError(
                "--server-env is not of the form NAME=VALUE",
                hint="for example --server-env VLLM_KV_CACHE_LAYOUT=HND",
            )
        if name in _OURS:
            raise StudyError(f"--server-env {name} is set by kvtriage itself", hint="leave it out")
        if _SECRET.search(name.upper()) or _TOKEN.search(value) or _names_somebody(value):
            raise StudyError(
                f"--server-env {name} may hold a secret, and would stand in records and logs",
                hint="put it into kvtriage's own environment: servers inherit that, and nothing of it is recorded",
            )
        if not value.isprintable():
            raise StudyError(f"the value of --server-env {name} is not printable", hint="give plain text")
        if name in found:
            raise StudyError(f"--server-env {name} is given twice", hint="all servers are started with one value")
        found[name] = value
    return found


def show_variables(variables: Mapping[str, str]) -> tuple[str, ...]:
    """('NAME=VALUE', ...) by name: as the conditions keep them, in front of the arguments."""
    return tuple(f"{name}={value}" for name, value in sorted(variables.items()))


def _names_somebody(value: str) -> bool:
    """Whether it is an address with credentials before its @, such as a proxy's; a token may stand there alone."""
    try:
        return urlsplit(value if "//" in value else f"//{value}").username is not None
    except ValueError:
        return "@" in value
