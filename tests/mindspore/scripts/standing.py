"""A rank that tells where it stands, before communication is initialised and afterwards.

It makes no group that it does not belong to: on CPU MindSpore then hangs in the next one that it makes.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import communication
from mindspore.mint import distributed
from ranks import tell

from monitor.failures import Failures
from monitor.mindspore.process_group import group_ranks, has_others, initialized, is_settled, place
from monitor.recording.run import identity_of


def standing(**groups: Any) -> dict[str, Any]:
    here = place(**groups)
    found = {role: list(ranks) for role, ranks in here.groups.items()}
    flags = {"settled": is_settled(), "initialized": initialized(), "others": has_others()}
    return {"rank": here.rank, "world": here.world_size, "groups": found, "store": here.store is not None, **flags}


def refusal(group: Any) -> str:
    try:
        return str(group_ranks("dp_group", group))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


mindspore.set_device("CPU")
tell(standing())
communication.init("mccl")
rank, world = communication.get_rank(), communication.get_group_size()
communication.create_group("both", list(range(world)))
alone = distributed.new_group([rank])
tell(standing(dp="both", tp=alone, pp="", cp=None))
tell([group_ranks("dp_group", name) for name in ("mccl_world_group", "hccl_world_group", "both", alone, "")])
tell([refusal("elsewhere"), refusal(3)])
failures = Failures(rank)
names = [identity_of(place(), ordinal, failures) for ordinal in (0, 1)]
tell([[name.agreed, name.job_id] for name in names])
tell(dict(failures.counts))
distributed.all_reduce(together := mindspore.Tensor([1.0]))
together.asnumpy()  # all are here: neither a barrier nor a collective waits by itself
communication.destroy_group("both")
tell(refusal("both"))
