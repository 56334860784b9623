"""What the taps of compiled code measure: the roles of entries on a tape."""

from __future__ import annotations

from typing import Final

BEGIN: Final = "begin"
INPUT: Final = "input"
OUTPUT: Final = "output"
INPUT_GRAD: Final = "input_grad"
OUTPUT_GRAD: Final = "output_grad"
EVALUATION: Final = "evaluation"
PARAMETER: Final = "parameter"
TURN_BEGINS: Final = "turn begins"
REDUCED: Final = "reduced"
BEFORE: Final = "before"
AFTER: Final = "after"
TURN_ENDS: Final = "turn ends"

MARKS: Final = frozenset({BEGIN, EVALUATION, TURN_BEGINS, TURN_ENDS})
"""Roles whose entries hold no measurements, and are made in every step."""

ORDERED: Final = 1
UNORDERED: Final = 0
"""Whether calls begin in the order of the program, in place of the position of a tensor."""
