import pytest
from hypothesis import given, strategies as st

from monitor.coordinator.ownership import Ownership, alike_over, beyond, no_rank_monitored, reaches
from monitor.series import KINDS, LOCAL, Placement, Shard

MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
OF_WEIGHTS = {"linear_hook", "moe_router_weight_hook"}
OF_AN_UPDATE = {"update_ratio", "optimizer_health", "mg_direction", "adam_update", "adam_ratio"}
LEFT = {f"{kind}_updated" for kind in MOMENTS}
REPLICAS_AFTER_REDUCTION = {"grad_reduced", "param_origin", "param_updated", *MOMENTS, *LEFT, *OF_WEIGHTS, *OF_AN_UPDATE}
OF_ATTENTION = {"attention_hook", "attention_head_hook"}
OF_ROUTERS = {"moe_router_logit_hook", "moe_router_load_hook"}
OF_THE_RANK = {"actv", "actv_grad", "other", "replica", "run", "activation_hook", *OF_ATTENTION, *OF_ROUTERS}


def writers(groups, kind, module_ranks=(), known=lambda _: LOCAL, **tensor):
    """Ranks that write a series, of a job whose ranks have these (dp, tp) groups."""
    world = len(groups)
    owners = [Ownership(rank, world, module_ranks, dp, tp) for rank, (dp, tp) in enumerate(groups)]
    return {owner.rank for owner in owners if owner.writes(owner.placed(kind, known(owner.rank), **tensor))}


def cut_among(*groups):
    """What each rank knows of a tensor that the ranks of each of these groups hold parts of."""
    return lambda rank: Placement(shard=next(Shard(group, (8,)) for group in groups if rank in group))


def grid(dp, tp):
    """Groups of each rank, tensor-parallel ranks side by side."""
    return [
        (tuple(range(rank % tp, dp * tp, tp)), tuple(range(rank - rank % tp, rank - rank % tp + tp))) for rank in range(dp * tp)
    ]


def test_the_kinds_are_those_that_there_are():
    assert {*REPLICAS_AFTER_REDUCTION, *OF_THE_RANK, "grad_unreduced"} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_without_groups_every_rank_writes_everything(kind):
    assert writers([(None, None)] * 4, kind) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", sorted(REPLICAS_AFTER_REDUCTION))
def test_of_what_is_the_same_after_reduction_the_first_of_the_dp_group_writes(kind):
    assert writers([((0, 1, 2, 3), None)] * 4, kind) == {0}


@pytest.mark.parametrize("kind", ["grad_unreduced", *sorted(OF_THE_RANK)])
def test_of_what_differs_in_the_dp_group_every_rank_writes(kind):
    assert writers([((0, 1, 2, 3), None)] * 4, kind) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["grad_unreduced", *sorted(REPLICAS_AFTER_REDUCTION)])
def test_of_a_parameter_that_is_not_split_the_first_of_the_tp_group_writes(kind):
    assert writers([(None, (0, 1)), (None, (0, 1))], kind) == {0}
    assert writers([(None, (0, 1)), (None, (0, 1))], kind, tensor_parallel=True) == {0, 1}


@pytest.mark.parametrize("kind", sorted(OF_THE_RANK))
def test_of_what_belongs_to_no_parameter_every_rank_of_the_tp_group_writes(kind):
    assert writers([(None, (0, 1)), (None, (0, 1))], kind) == {0, 1}


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(KINDS), st.booleans())
def test_a_shard_is_never_dropped(dp, tp, kind, tensor_parallel):
    everybody = tuple(range(dp * tp))
    assert writers(grid(dp, tp), kind, known=cut_among(everybody), tensor_parallel=tensor_parallel) == set(everybody)


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(sorted(REPLICAS_AFTER_REDUCTION)))
def test_a_tensor_that_is_cut_in_one_direction_is_written_once_in_the_other(dp, tp, kind):
    groups = grid(dp, tp)
    assert writers(groups, kind, known=cut_among(*(mates for _, mates in groups))) == set(range(tp))
    assert writers(groups, kind, known=cut_among(*(peers for peers, _ in groups))) == {peers * tp for peers in range(dp)}


def test_a_term_of_a_sum_is_no_replica():
    assert writers([((0, 1), None)] * 2, "grad_reduced", known=lambda _: Placement(partial=True)) == {0, 1}


def test_a_term_of_a_sum_over_some_ranks_is_a_replica_over_the_others():
    groups = grid(2, 2)
    known = {rank: Placement(partial=True, differing=mates) for rank, (_, mates) in enumerate(groups)}
    assert writers(groups, "grad_reduced", known=known.get) == {0, 1}
    assert writers(groups, "grad_unreduced", known=known.get) == {0, 1, 2, 3}
    assert Ownership(3, 4, (), *groups[3]).placed("grad_reduced", known[3]) == Placement(replicas=(1, 3), partial=True)


@pytest.mark.parametrize("kind", sorted(REPLICAS_AFTER_REDUCTION))
def test_what_is_known_to_differ_is_written_by_every_rank_of_a_group_and_is_nothing_to_keep(kind):
    differing = Placement(differing=(0, 1))
    assert writers([((0, 1), None)] * 2, kind, known=lambda _: differing) == {0, 1}
    assert Ownership(0, 2, dp_group=(0, 1)).placed(kind, differing) == LOCAL


@pytest.mark.parametrize("kind", sorted(REPLICAS_AFTER_REDUCTION))
def test_what_differs_over_one_group_is_still_the_same_over_another(kind):
    groups = grid(2, 2)
    peers = [Placement(differing=data) for data, _ in groups]
    assert writers(groups, kind, known=lambda rank: peers[rank]) == {0, 2}


@pytest.mark.parametrize("kind", sorted(REPLICAS_AFTER_REDUCTION))
def test_a_data_parallel_group_that_is_passed_represents_the_one_of_the_parameter(kind):
    """Of an expert: four data-parallel ranks have two of them, each on two."""
    own = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    others = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}

    def known(rank):
        return Placement(unclaimed=own[rank], differing=others[rank], data_parallel=own[rank])

    assert writers([((0, 1, 2, 3), None)] * 4, kind, known=known) == {0, 1}
    assert writers([(None, None)] * 4, kind, known=known) == {0, 1, 2, 3}
    assert Ownership(3, 4, dp_group=(0, 1, 2, 3)).placed(kind, known(3)) == Placement(replicas=(1, 3))


def test_replicas_that_the_tensor_knows_of_and_those_of_the_groups_make_one_set():
    replicas = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    owner = Ownership(3, 4, dp_group=(0, 1, 2, 3))
    assert owner.placed("grad_reduced", Placement(replicas=replicas[3])).replicas == (0, 1, 2, 3)
    assert owner.placed("grad_unreduced", Placement(replicas=replicas[3])).replicas == (1, 3)


def test_replicas_that_no_one_passed_a_group_for_are_written_by_all_and_known():
    known = Placement(unclaimed=(0, 1))
    assert writers([(None, None)] * 2, "grad_reduced", known=lambda _: known) == {0, 1}
    assert Ownership(0, 2, dp_group=(0, 1)).placed("grad_reduced", known) == Placement(replicas=(0, 1))


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_in_a_grid_those_alike_over_both_groups_are_all_ranks(dp, tp, data):
    rank = data.draw(st.integers(0, dp * tp - 1))
    everybody = tuple(range(dp * tp)) if dp * tp > 1 else ()
    assert alike_over(rank, grid(dp, tp)[rank]) == everybody


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(sorted(REPLICAS_AFTER_REDUCTION)))
def test_in_a_grid_each_number_is_written_once(dp, tp, kind):
    assert writers(grid(dp, tp), kind) == {0}
    assert writers(grid(dp, tp), kind, tensor_parallel=True) == set(range(tp))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_not_monitored_writes_nothing_not_even_a_shard(kind):
    assert writers([(None, None)] * 4, kind, module_ranks=[1, 3]) == {1, 3}
    assert writers([(None, None)] * 4, kind, module_ranks=[1, 3], known=cut_among((0, 1, 2, 3))) == {1, 3}


def test_the_owner_is_the_first_monitored_rank_whatever_the_order():
    assert writers([((3, 2, 1, 0), None)] * 4, "grad_reduced", module_ranks=[3, 1]) == {1}


@given(st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 8)), st.sampled_from(sorted(REPLICAS_AFTER_REDUCTION)))
def test_whatever_ranks_of_a_grid_are_monitored_one_of_them_writes(dp, tp, module_ranks, kind):
    monitored = module_ranks & set(range(dp * tp))
    assert writers(grid(dp, tp), kind, monitored or [9]) == ({min(monitored)} if monitored else set())


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sets(st.integers(0, 8), min_size=1),
    st.sampled_from(sorted(REPLICAS_AFTER_REDUCTION)),
)
def test_of_split_parameters_each_part_that_is_monitored_is_written_once(dp, tp, module_ranks, kind):
    written = writers(grid(dp, tp), kind, module_ranks, tensor_parallel=True)
    assert sorted(rank % tp for rank in written) == sorted({rank % tp for rank in module_ranks if rank < dp * tp})


def test_a_group_that_this_rank_is_not_in_decides_nothing():
    assert Ownership(5, 8, dp_group=(0, 1)).placed("grad_reduced", LOCAL) == LOCAL


def test_ranks_that_are_not_in_the_job_are_reported():
    assert no_rank_monitored([9, 8], 8) == (
        "module_ranks [8, 9] names no rank of this job, whose ranks are 0 to 7: nothing will be recorded"
    )


@pytest.mark.parametrize("module_ranks", [(), (7, 8), range(8)])
def test_ranks_that_are_in_the_job_are_not(module_ranks):
    assert no_rank_monitored(module_ranks, 8) is None


class Compared(int):
    """A rank that counts how often it was compared with another."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Compared.times += 1
        return int(self) == other


def test_of_a_thousand_monitored_ranks_the_owner_is_found_without_going_through_all_pairs():
    ranks = tuple(map(Compared, range(1024)))
    ownership = Ownership(1023, 1024, module_ranks=ranks[512:], dp_group=range(1024))
    Compared.times = 0
    assert ownership.owner(Placement(replicas=tuple(range(1024)))) == 512
    assert Compared.times <= 1024


@pytest.mark.parametrize(
    ("groups", "summed_over", "expected"),
    [
        ({}, [], False),
        ({}, [range(8)], True),
        ({}, [(0, 1, 2, 3), (0, 4)], True),
        ({}, [(0, 1, 2, 3)], False),
        ({"dp_group": (0,)}, [], True),
        ({"dp_group": (0, 4)}, [(0, 4)], True),
        ({"dp_group": (0, 4)}, [(0, 1)], False),
        ({"pp_group": range(8)}, [], True),
        ({"pp_group": (0, 4), "tp_group": (0, 1, 2, 3)}, [], True),
        ({"pp_group": (0, 4)}, [], False),
        ({"pp_group": (0, 4)}, [(0, 1, 2, 3)], True),
        ({"dp_group": (0, 2), "tp_group": (0, 1)}, [], False),
    ],
)
def test_a_sum_reaches_all_who_share_a_parameter_or_it_does_not(groups, summed_over, expected):
    assert reaches(Ownership(0, 8, **groups), 0, 8, summed_over) is expected


@pytest.mark.parametrize(
    ("groups", "parts", "expected"),
    [
        ({"dp_group": (0, 1)}, [], (2, 3)),
        ({"dp_group": (0, 1), "tp_group": (0, 2)}, [], ()),
        ({"dp_group": (0, 1), "pp_group": (0, 2)}, [], ()),
        ({"dp_group": (0, 1)}, [(0, 2)], ()),
        ({"dp_group": (0, 1, 2, 3)}, [], ()),
        ({"tp_group": (0, 2)}, [], ()),
        ({}, [], ()),
    ],
)
def test_ranks_beyond_all_groups_are_those_that_no_passed_group_leads_to(groups, parts, expected):
    assert beyond(Ownership(0, 4, **groups), 0, parts, [(0, 1, 2, 3)]) == expected
    assert beyond(Ownership(0, 4, **groups), 0, parts, [(0, 1)]) == ()


def test_of_one_rank_alone_nothing_has_to_be_summed():
    assert reaches(Ownership(0), 0, 1, [])


@pytest.mark.parametrize(
    ("groups", "kind", "placed", "expected"),
    [
        ({"pp_group": (0, 1)}, "param_origin", LOCAL, True),
        ({"pp_group": (0, 1)}, "grad_unreduced", LOCAL, False),
        ({"pp_group": (0, 1)}, "param_origin", Placement(unclaimed=(0, 2)), False),
        ({"pp_group": range(8)}, "param_origin", LOCAL, False),
        ({"pp_group": (0, 1), "dp_group": (0,)}, "param_origin", LOCAL, False),
        ({"pp_group": (0, 1), "tp_group": (0, 2)}, "param_origin", Placement(replicas=(0, 2)), True),
        ({"pp_group": (0, 1, 4, 5), "tp_group": (0, 2)}, "param_origin", Placement(replicas=(0, 2)), False),
        ({}, "param_origin", LOCAL, False),
    ],
)
def test_ranks_outside_of_a_pipeline_may_hold_replicas_that_count_apart(groups, kind, placed, expected):
    assert Ownership(0, 8, **groups).counts_apart(kind, placed) is expected
