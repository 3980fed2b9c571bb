"""The set that was found takes the place of the suspects, for everything that comes after."""

from __future__ import annotations

import msgspec

from kvtriage.records.frontier import Frontier
from kvtriage.records.sensitivities import Sensitivities

__all__ = ["adopt"]


def adopt(sensitivities: Sensitivities, frontier: Frontier | None) -> Sensitivities:
    """The sensitivities as the ablation reads them: the layers it keeps in BF16 are those that were found jointly.

    Unchanged where no search was made, where it found that none has to stay in BF16, or where nothing keeps
    the margins: the ablation then still shows what skipping the suspects of diagnose would buy.
    """
    if frontier is None or not frontier.found:
        return sensitivities
    return msgspec.structs.replace(
        sensitivities, suspects=frontier.found, suspects_stand_out=True, explanation=frontier.explanation
    )
