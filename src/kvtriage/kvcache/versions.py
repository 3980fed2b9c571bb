"""Which release of vLLM: what its start-up lines mean, and what it is known to do.

The allocator is that of 0.32.0, whose source was read and whose own functions answered. For other releases it
follows rules that were changed by a named pull request, or that a published log shows:

    from      rule                                                               source
    0.9.1     concurrency is blocks over the blocks of a request, before that    #19029
              tokens over tokens
    0.21      the token line is concurrency · max_model_len, before that         #38364, #40694; logs of 0.20.0
              blocks shared out to the groups · the smallest block               and 0.21.0
    0.26      two batches are in flight under asynchronous scheduling, before    #47728, #49878
              that one is reserved for

One rule is followed for all releases alike: the null block is kept back when one request must fit
(v1/core/kv_cache_utils.py:2630). Before #47272, of July 2026, a server with one block less did start, and the longest
request then waited for ever.

Recurrent models share states by prefix unless told otherwise in 0.32 (engine/arg_utils.py:3021). A log of 0.19.0
(#40691) says that they did not then. What the releases between do is not known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvtriage.errors import BadInput

__all__ = ["MODELLED", "EngineVersion"]

_FORM = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?((?:[._-]?(?:a|b|rc|post|dev)\d*)*)(?:\+[\w.]+)?", re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class EngineVersion:
    """A release of vLLM, or a build on the way to it: a build counts as the release that it leads to."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> EngineVersion:
        """'0.32.0', 'v0.26', '0.23.1rc1.dev531+g60995c05b'.

        Raises BadInput for anything else. A date is no version, and neither is '0.1.dev20073': so a build calls
        itself that was made without knowing its release.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise BadInput(f"{text[:60]!a} is not a version of vLLM", hint="give it as 0.32.0 or 0.23.1rc1.dev531")
        major, minor, patch = (int(number or 0) for number in found.group(1, 2, 3))
        if (major, minor) == (0, 1) and "dev" in found.group(4):
            raise BadInput(
                f"{text[:60]!a} does not say which release the build leads to", hint="give the release, as 0.32.0"
            )
        return cls(major, minor, patch)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def counts_requests_by_blocks(self) -> bool:
        """Concurrency is what the blocks of one request leave room for, window by window."""
        return self >= EngineVersion(0, 9, 1)

    @property
    def derives_tokens_from_concurrency(self) -> bool:
        """The token line is int(concurrency · max_model_len)."""
        return self >= EngineVersion(0, 21)

    @property
    def reserves_batches_in_flight(self) -> bool:
        """Every batch in flight is reserved for, not one alone."""
        return self >= EngineVersion(0, 26)

    @property
    def keeps_states_by_prefix(self) -> bool | None:
        """Whether a recurrent model uses prefix caching where no flag says so. None: not known for this release."""
        if self >= MODELLED:
            return True
        return False if self < EngineVersion(0, 20) else None

    def batches_in_flight(self, *, async_scheduling: bool, pipeline_parallel: int = 1) -> int:
        """Batches whose tokens a window is reserved for (config/vllm.py:577-598).

        As many as there are stages, and one more under asynchronous scheduling.
        """
        if not self.reserves_batches_in_flight:
            return 1
        return pipeline_parallel + (1 if async_scheduling else 0)

    def caveats(self, *, skips_layers: bool = False, is_recurrent: bool = False) -> tuple[str, ...]:
        """What must be said beside a figure for this release; () for the one that is modelled."""
        if self.major == MODELLED.major and self.minor == MODELLED.minor:
            return ()
        said = [f"pages and groups are those of vLLM {MODELLED}; what {self} does otherwise is known in part"]
        if self < EngineVersion(0, 9, 1):
            said.append("engines before 0.9.1 may keep every token of a sliding layer")
        if skips_layers and self < MODELLED:
            said.append(
                "how earlier releases size the pages of skipped layers is not known here (#33695, #42890, #47309)"
            )
        if is_recurrent and self.keeps_states_by_prefix is None:
            said.append(f"whether {self} caches prefixes of recurrent models by default is not known here")
        return tuple(said)


MODELLED = EngineVersion(0, 32, 0)
"""The release whose allocator this is."""
