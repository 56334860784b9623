"""Steps that the optimizer skipped because the loss scale was too high. Gradients that are not finite there are no fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from monitor.series import CLIPPED_NORM, GRAD_NORM, GRADIENT_KINDS

Steps = NDArray[np.int64]

LOGGED: Final = "logged_loss_scale"
_NOTES: Final = ("loss_scale", "found_inf", LOGGED)
"""Notes of the manifest of a training with a loss scale. Without one, steps are skipped for other reasons."""

AT_START: Final = 40
"""Steps in a row, from the first one on, in which a scale may fall until it fits. In so many it falls from 2^40 to 1."""

FEW: Final = 5
AMONG: Final = 100
"""Later at most ``FEW`` of so many recorded steps may be skipped. Scales rise once in 1,000 or 2,000 steps (the defaults of
torch, DeepSpeed, Megatron and MindSpore), and fall again in one or two if they are too high. The limit is our choice.
"""

SCALED_KINDS: Final = (*GRADIENT_KINDS, "actv_grad")
SCALED_NUMBERS: Final = (GRAD_NORM, CLIPPED_NORM)
"""What a loss scale multiplies: these kinds, and these numbers of the run."""


def has_loss_scale(notes: Mapping[str, object]) -> bool:
    """Whether a rank trained with a loss scale, by the notes of its manifest."""
    return any(name in notes for name in _NOTES)


def overflows_among(skipped: Steps, recorded: Steps) -> Steps:
    """Those of the skipped steps in which the scale was too high for once: few, or the first ones. A scale that never fits is a
    fault.

    Args:
        recorded: All recorded steps, also the skipped ones. Both are ascending.
    """
    places = np.searchsorted(recorded, skipped)
    start = int((places == np.arange(len(places))).sum())
    later = places[start:]
    near = np.searchsorted(later, later + AMONG // 2, "right") - np.searchsorted(later, later - AMONG // 2)
    first = skipped[:start] if start <= AT_START and start < len(recorded) else skipped[:0]
    return np.concatenate([first, skipped[start:][near <= FEW]])
