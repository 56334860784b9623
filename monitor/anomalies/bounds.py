"""Bounds of recorded numbers, each with what lies beyond it, what to do then, and where the bound comes from."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monitor.series import HEALTH_KIND, KIND_TABLE
from monitor.stats.partials import Floats

Flags = NDArray[np.bool_]


class Bound(NamedTuple):
    """Values of a column that are a fault.

    Attributes:
        kinds: The kinds with the column; empty: all that have it.
        column: Its name.
        high: Whether values from ``limit`` on are a fault; otherwise values up to ``limit``.
        means: What such a value says, after "its entropy is 0.001: ".
        then: What to do.
        source: A paper or a thread, or ``MEASURED``.
        ends: What the names of the rows end with; empty: all rows.
        in_a_row: Recorded steps in a row at which a tensor must be beyond it: single steps may be, in healthy runs.
        after: The first recorded values of a tensor that are not judged.
    """

    kinds: tuple[str, ...]
    column: str
    limit: float
    high: bool
    means: str
    then: str = ""
    source: str = ""
    in_a_row: int = 1
    after: int = 0
    ends: str = ""

    def is_of(self, kind: str, column: str) -> bool:
        """Whether a column of a kind has this bound."""
        return column == self.column and (not self.kinds or kind in self.kinds)

    def is_crossed(self, values: Floats) -> Flags:
        """Which values are a fault. NaN is none."""
        crossed: Flags = values >= self.limit if self.high else values <= self.limit
        return crossed

    def rows_in_a_row(self, values: Floats, seen: NDArray[Any], in_a_row: NDArray[Any]) -> NDArray[Any]:
        """How many rows in a row are beyond the bound, with these values.

        Args:
            seen: The number of earlier values of each tensor.
            in_a_row: How many of these were beyond the bound, in a row.
        """
        return np.where(self.is_crossed(values) & (seen >= self.after), in_a_row + 1, 0)


class BoundGroup(NamedTuple):
    """A check of a report that compares columns with bounds.

    Attributes:
        nothing: What it says if no column was recorded.
        look: See ``CheckResult``.
    """

    check: str
    nothing: str
    look: str
    bounds: tuple[Bound, ...]


MEASURED: Final = "our measurement"
LASTING: Final = 32
"""Recorded steps in a row. In eight healthy trainings of small transformers ``staleness`` was above its bound for 9 at most."""
OF_NEW_WEIGHTS: Final = 64
"""Recorded values of a weight that may have begun at 0, so that its first updates are as large as itself."""
_IN_LOW_PRECISION: Final = tuple(kind.name for kind in KIND_TABLE if kind.role != "MOMENT")
"""Moments stay in float32: those of healthy trainings are mostly too small for float16."""

_FEATURES: Final = '"recording_l2_features": true and l2_targets'

GROUPS: Final = (
    BoundGroup(
        "Low precision",
        "No op that counts what narrower numbers lose was recorded.",
        '"ops": ["overflow_fp16", "underflow_bf16"]',
        # FP8 needs a scale, so `trainermon precision` judges it.
        tuple(
            bound
            for name in ("fp16", "bf16")
            for bound in (
                Bound(_IN_LOW_PRECISION, f"overflow_{name}", 1e-9, True, "elements overflow this format"),
                Bound(_IN_LOW_PRECISION, f"underflow_{name}", 0.9, True, "most of its elements become zero in this format"),
            )
        ),
    ),
    BoundGroup(
        "Attention",
        "It was not recorded.",
        _FEATURES,
        (
            Bound(("attention_hook",), "entropy", 0.01, False, "attention has collapsed onto single tokens"),
            Bound(("attention_hook",), "softmax_max", 0.99, True, "attention has collapsed onto single tokens"),
            Bound(
                ("attention_head_hook",),
                "max_logit",
                100.0,
                True,
                "scores of attention are so large that training may diverge",
                "See whether they keep growing. Normalise Q and K, clip them (QK-clip), or lower the learning rate.",
                "QK-clip acts from 100 on: Kimi K2, https://arxiv.org/abs/2507.20534",
            ),
            Bound(
                ("attention_head_hook",),
                "entropy",
                0.01,
                False,
                "all heads of the module attend to single tokens",
                "Lower the learning rate, or normalise the weights of Q and K.",
                "Entropy collapse: Zhai et al., https://arxiv.org/abs/2303.06296. The limit: our measurement, docs/features.md",
                ends=".heads",  # a single head may do so in a healthy model, such as one that attends to a sink
            ),
        ),
    ),
    BoundGroup(
        "Experts",
        "They were not recorded.",
        _FEATURES,
        (
            Bound(
                ("moe_router_logit_hook",),
                "per_token_expert_entropy",
                0.01,
                False,
                "every token chooses one expert with certainty",
            ),
            Bound(
                ("moe_router_weight_hook",),
                "router_weight_similarity",
                0.99,
                True,
                "all experts respond to the same tokens",
            ),
            Bound(
                ("moe_router_load_hook",),
                "logit_max",
                128.0,
                True,
                "bfloat16 rounds logits of this size by up to 0.5, which changes the probability of an expert by up to 65 %",
                "Add a router z-loss, or raise its coefficient, and compute the router in float32.",
                "Zoph et al. 2022 (ST-MoE, arXiv 2202.08906): rounding of large logits. The limit follows from the format",
            ),
            Bound(
                ("moe_router_load_hook",),
                "dropped",
                0.5,
                True,
                "these assignments exceed the capacity of their experts, and the tokens skip them",
                "Raise the capacity factor, or the coefficient of the load-balancing loss.",
                "Fedus et al. 2021 (Switch Transformer, arXiv 2101.03961): dropped tokens. The limit is our choice",
            ),
        ),
    ),
    BoundGroup(
        "Activations",
        "The outputs of no module were looked at.",
        _FEATURES,
        (
            Bound(
                ("activation_hook",),
                "dead_units",
                0.5,
                True,
                "most of its units are dead: they compute nothing and receive no gradient",
                "Look at the learning rate before this step, and at the bias in front of the activation.",
                "Lu et al. 2019, arXiv:1903.06733; Voita et al. 2023, arXiv:2309.04827",
            ),
            Bound(
                ("activation_hook",),
                "effective_rank",
                1.001,
                False,
                "all tokens point in the same direction",
                "Look at the residual connections and norms in front of it, and at the scale of the weights.",
                "Dong et al. 2021, arXiv:2103.03404; Noci et al. 2022, arXiv:2206.03126",
            ),
        ),
    ),
    BoundGroup(
        "Optimizer",
        "It was not recorded.",
        '"optimizer_health": true',
        (
            Bound(
                (HEALTH_KIND,),
                "staleness",
                2.3,
                True,
                "the gradient has outgrown Adam's second moment",
                "Lower beta2 or the learning rate, or clip updates as StableAdamW does.",
                "Wortsman et al. 2023, arXiv 2304.13013: loss spikes follow 1 to 8 steps after 2.3; the number of steps is "
                + MEASURED,
                LASTING,
            ),
            Bound(
                (HEALTH_KIND,),
                "swallowed",
                0.9,
                True,
                "rounding swallows its updates",
                "Let the optimizer update float32 master weights, or use stochastic rounding.",
                "Zamirai et al. 2020, arXiv 2010.06192: nearest rounding cancels small updates; the limit is " + MEASURED,
                LASTING,
            ),
        ),
    ),
    BoundGroup(
        "Size of updates",
        "It was not recorded.",
        '"update_ratio": true',
        (
            Bound(
                ("update_ratio",),
                "update_ratio",
                0.1,
                True,
                "a step changes this weight too much",
                "Lower the learning rate of this weight.",
                "CS231n, Neural Networks Part 3: about 1e-3 is healthy, more is too high; the limit is " + MEASURED,
                LASTING,
                OF_NEW_WEIGHTS,
            ),
        ),
    ),
)
"""In the order in which the page shows them."""
