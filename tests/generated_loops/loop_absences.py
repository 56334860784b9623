"""Why a row may be missing, and what a monitor may warn of. Whatever else is missing or said fails the test."""

from __future__ import annotations

from typing import Final

COMPLETE_EARLY: Final = (
    "grad_unreduced: the last micro-batch did not reach the parameter, and its gradient was clipped or unscaled before anybody "
    "could know, or its optimizer did not step (docs/decisions/057-unreduced-gradients-are-read-once.md, docs/optimizers.md)"
)
LEAF: Final = (
    "actv_grad of an output: a tensor that no operation has made, as a parameter, may be a result in several micro-batches. It "
    "cannot be told whose backward is running"
)
UNHELD: Final = "a kind that needs an optimizer, of a parameter that no optimizer has which was passed (docs/optimizers.md)"

WARNINGS: Final = {
    "parameters of no optimizer": "UNHELD",
    "ur_distribution": "an optimizer that is no Adam has no rows of Adam's updates",
    "nothing of": "nothing has a gradient, no optimizer keeps moments, a gradient of COMPLETE_EARLY is missing, or an "
    "optimizer was left out",
    "no optimizer's step": "an `if` left every optimizer out of every iteration",
}
"""By how their cause begins."""
