"""Which modules and parameters are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, strategies as st

from monitor.config import Target
from monitor.selection import (
    ALL_TENSORS,
    MAX_EXPLAINED,
    NO_TENSORS,
    SIDES,
    ChunkNames,
    ModuleSelection,
    TargetSelection,
    TensorChoice,
    Unmatched,
    parents,
    squashed,
)

MODULES = ("", "h", "h.1", "h.1.mlp", "h.10", "h.10.mlp", "ln_f")
PARAMETERS = ("wpe", "h.1.mlp.weight", "h.1.mlp.bias", "h.10.mlp.weight", "ln_f.weight")
SMALL = ChunkNames(MODULES, PARAMETERS)
EVERYTHING = ModuleSelection(ALL_TENSORS, ALL_TENSORS, ALL_TENSORS, ALL_TENSORS)


def select(
    targets: Mapping[str, Mapping[str, str]] | Sequence[str],
    *chunks: ChunkNames,
    all_xy: bool = False,
    forward_only: bool = False,
    backward_only: bool = False,
) -> TargetSelection:
    """A selection among ``chunks``, or in the small model, by targets as they stand in the file."""
    written = targets if isinstance(targets, Mapping) else {name: {} for name in targets}
    config = {name: Target.model_validate(dict(sides)) for name, sides in written.items()}
    return TargetSelection(config, chunks or (SMALL,), all_xy=all_xy, forward_only=forward_only, backward_only=backward_only)


def modules(selection: TargetSelection, chunk: int = 0, names: ChunkNames = SMALL) -> list[str]:
    return [name for name in names.modules if selection.module(chunk, name) is not None]


def parameters(selection: TargetSelection, chunk: int = 0, names: ChunkNames = SMALL) -> list[str]:
    return [name for name in names.parameters if selection.parameter(chunk, name)]


def choices(**sides: TensorChoice) -> ModuleSelection:
    """What is wanted where only these sides are."""
    return ModuleSelection(**(dict.fromkeys(SIDES, NO_TENSORS) | sides))


class TestWithoutTargets:
    def test_every_module_and_parameter_is_watched(self) -> None:
        selection = select({})
        assert {selection.module(0, name) for name in MODULES} == {EVERYTHING}
        assert parameters(selection) == list(PARAMETERS)
        assert selection.unmatched == ()
        assert selection.warning() is None

    def test_forward_only_leaves_out_the_gradients(self) -> None:
        assert select({}, forward_only=True).module(0, "h") == choices(input=ALL_TENSORS, output=ALL_TENSORS)

    def test_backward_only_leaves_the_gradients_alone(self) -> None:
        assert select({}, backward_only=True).module(0, "h") == choices(input_grad=ALL_TENSORS, output_grad=ALL_TENSORS)

    def test_both_together_leave_no_activations_and_all_parameters(self) -> None:
        selection = select({}, forward_only=True, backward_only=True, all_xy=True)
        assert modules(selection) == []
        assert parameters(selection) == list(PARAMETERS)


class TestTargets:
    def test_a_module_has_its_own_tensors_and_all_parameters_below_it(self) -> None:
        selection = select(["h.1"])
        assert modules(selection) == ["h.1"]
        assert selection.module(0, "h.1") == EVERYTHING
        assert parameters(selection) == ["h.1.mlp.weight", "h.1.mlp.bias"]

    def test_the_root_has_its_own_tensors_and_every_parameter(self) -> None:
        selection = select([""])
        assert modules(selection) == [""]
        assert parameters(selection) == list(PARAMETERS)

    def test_a_parameter_is_selected_by_its_own_name_alone(self) -> None:
        selection = select(["h.1.mlp.weight"])
        assert modules(selection) == []
        assert parameters(selection) == ["h.1.mlp.weight"]

    def test_a_parameter_is_found_below_a_path_that_is_no_module(self) -> None:
        names = ChunkNames(("", "network"), ("bert.encoder.weight", "bert.encoders.weight"))
        selection = select(["bert.encoder"], names)
        assert parameters(selection, names=names) == ["bert.encoder.weight"]
        assert selection.unmatched == ()

    def test_all_xy_adds_the_tensors_of_every_module_and_no_parameter(self) -> None:
        selection = select({"h.1": {"input": "tensor"}}, all_xy=True)
        assert modules(selection) == list(MODULES)
        assert selection.module(0, "h.10") == EVERYTHING
        assert parameters(selection) == ["h.1.mlp.weight", "h.1.mlp.bias"]

    def test_under_all_xy_a_named_module_keeps_its_own_choice(self) -> None:
        selection = select({"h.1": {"output_grad": "tensor"}}, all_xy=True)
        assert selection.module(0, "h.1") == choices(output_grad=TensorChoice(wanted=True, length=1))

    def test_a_module_whose_only_side_is_switched_off_is_not_watched_even_under_all_xy(self) -> None:
        selection = select({"h.1": {"output_grad": "tensor"}}, all_xy=True, forward_only=True)
        assert selection.module(0, "h.1") is None
        assert selection.unmatched == ()

    def test_a_name_with_a_colon_is_just_a_name(self) -> None:
        names = ChunkNames(("", "a:b", "x:0"), ("a:b.weight",))
        selection = select(["a:b", "0:x:0"], names)
        assert modules(selection, names=names) == ["a:b", "x:0"]
        assert parameters(selection, names=names) == ["a:b.weight"]

    def test_names_may_hold_any_character(self) -> None:
        odd = 'a\n"b,c/d²'
        names = ChunkNames(("", odd), (f"{odd}.weight",))
        assert parameters(select([f"0:{odd}"], names), names=names) == [f"{odd}.weight"]

    def test_a_long_number_is_no_chunk(self) -> None:
        """Python refuses to convert integers of some thousands of digits."""
        target = "9" * 5000 + ":h"
        assert [one.target for one in select([target]).unmatched] == [target]


class TestSides:
    def test_only_the_named_sides_are_wanted(self) -> None:
        selection = select({"h.1": {"input": "tensor", "output_grad": "tuple[2]:1"}})
        expected = choices(input=TensorChoice(True, 1, None), output_grad=TensorChoice(True, 2, 1))
        assert selection.module(0, "h.1") == expected

    def test_a_tuple_without_an_index_means_its_first_element(self) -> None:
        assert select({"h.1": {"input": "tuple[3]"}}).module(0, "h.1") == choices(input=TensorChoice(True, 3, 0))

    @pytest.mark.parametrize(
        ("choice", "taken"),
        [(ALL_TENSORS, [0, 1, 2]), (NO_TENSORS, []), (TensorChoice(True, 3, 1), [1]), (TensorChoice(True, 1, None), [0, 1, 2])],
    )
    def test_an_index_takes_one_element_and_none_takes_all(self, choice: TensorChoice, taken: list[int]) -> None:
        assert [position for position in range(3) if choice.takes(position)] == taken

    def test_forward_only_drops_the_gradients_that_a_target_names(self) -> None:
        selection = select({"h.1": {"input": "tensor", "input_grad": "tensor"}}, forward_only=True)
        assert selection.module(0, "h.1") == choices(input=TensorChoice(True, 1, None))

    def test_backward_only_drops_the_forward_sides_that_a_target_names(self) -> None:
        selection = select({"h.1": {"input": "tensor", "input_grad": "tensor"}}, backward_only=True)
        assert selection.module(0, "h.1") == choices(input_grad=TensorChoice(True, 1, None))


class TestSpellings:
    WRAPPED = ChunkNames(("", "module", "module.h", "module.h.0"), ("module.h.0.weight", "module.h.1"))

    @pytest.mark.parametrize("target", ["h.0", "module.h.0", "module.module.h.0", "_orig_mod.module.h._orig_mod.0"])
    @pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
    def test_leading_modules_and_wrappers_make_no_difference_on_either_side(self, target: str, prefix: str) -> None:
        names = ChunkNames(("", f"{prefix}h", f"{prefix}h.0"), (f"{prefix}h.0.weight", f"{prefix}h.1"))
        selection = select([target], names)
        assert modules(selection, names=names) == [f"{prefix}h.0"]
        assert parameters(selection, names=names) == [f"{prefix}h.0.weight"]

    def test_the_root_and_the_module_it_wraps_are_distinguished(self) -> None:
        assert modules(select([""], self.WRAPPED), names=self.WRAPPED) == [""]
        assert modules(select(["module"], self.WRAPPED), names=self.WRAPPED) == ["module"]

    def test_the_wrapped_root_is_the_root_of_a_model_that_is_not_wrapped(self) -> None:
        assert modules(select(["module"])) == [""]

    def test_a_name_that_is_met_exactly_is_not_taken_for_another(self) -> None:
        names = ChunkNames(("", "h", "module", "module.h"), ())
        assert modules(select(["h"], names), names=names) == ["h"]
        assert modules(select(["module.h"], names), names=names) == ["module.h"]

    @pytest.mark.parametrize(
        "target",
        [
            "63.mlp",
            "layers.63.mlp",
            "module.layers.63.mlp",
            "module.encoder.layers.63.mlp",
            "encoder.layers.63.mlp",
            "0:63.mlp",
        ],
    )
    def test_the_short_and_the_full_spelling_both_match(self, target: str) -> None:
        mlp = "module.encoder.layers.63.mlp"
        names = ChunkNames(("", "module", mlp), (f"{mlp}.weight",))
        selection = select([target], names)
        assert modules(selection, names=names) == [mlp]
        assert parameters(selection, names=names) == [f"{mlp}.weight"]

    def test_a_parameter_is_found_by_its_short_spelling(self) -> None:
        names = ChunkNames(("", "model", "model.norm"), ("model.norm.weight", "model.norm.bias"))
        assert parameters(select(["norm.bias"], names), names=names) == ["model.norm.bias"]

    def test_a_short_spelling_that_fits_several_names_takes_all_of_them_and_says_so(self) -> None:
        names = ChunkNames(("", "text", "text.layers.0", "vision", "vision.layers.0"), ("text.layers.0.w", "vision.layers.0.w"))
        selection = select(["0", "text.layers.0.w"], names)
        assert modules(selection, names=names) == ["text.layers.0", "vision.layers.0"]
        assert parameters(selection, names=names) == ["text.layers.0.w", "vision.layers.0.w"]
        assert selection.warning() is None
        assert selection.notice() == (
            "Targets whose short name matches several names: '0' (2: 'text.layers.0', 'vision.layers.0'). "
            "All matches are recorded."
        )

    def test_one_thing_that_wrappers_list_twice_is_not_several(self) -> None:
        names = ChunkNames(("", "module", "module.layers.0", "layers.0"), ())
        assert select(["0"], names).notice() is None

    def test_a_full_name_is_not_taken_for_the_short_one_of_another(self) -> None:
        names = ChunkNames(("", "norm", "block", "block.norm"), ())
        selection = select(["norm"], names)
        assert modules(selection, names=names) == ["norm"]
        assert selection.notice() is None


class TestChunks:
    FIRST = ChunkNames(("", "layers.0"), ("layers.0.weight",))
    SECOND = ChunkNames(("", "layers.0", "layers.1"), ("layers.0.weight", "layers.1.weight"))

    def test_without_a_number_a_target_holds_for_every_chunk(self) -> None:
        selection = select(["layers.0"], self.FIRST, self.SECOND)
        assert [modules(selection, 0, self.FIRST), modules(selection, 1, self.SECOND)] == [["layers.0"], ["layers.0"]]

    def test_with_a_number_it_holds_for_that_chunk(self) -> None:
        selection = select(["1:layers.0"], self.FIRST, self.SECOND)
        assert [modules(selection, 0, self.FIRST), modules(selection, 1, self.SECOND)] == [[], ["layers.0"]]
        assert parameters(selection, 0, self.FIRST) == []
        assert parameters(selection, 1, self.SECOND) == ["layers.0.weight"]

    def test_the_root_of_one_chunk_can_be_named(self) -> None:
        selection = select(["0:"], self.FIRST, self.SECOND)
        assert [modules(selection, 0, self.FIRST), modules(selection, 1, self.SECOND)] == [[""], []]

    def test_a_target_that_only_one_chunk_has_is_matched(self) -> None:
        selection = select(["layers.1"], self.FIRST, self.SECOND)
        assert selection.unmatched == ()
        assert modules(selection, 1, self.SECOND) == ["layers.1"]

    @pytest.mark.parametrize("numbered_first", [True, False])
    def test_a_target_with_a_number_has_precedence_in_its_chunk_wherever_it_stands(self, numbered_first: bool) -> None:
        targets = [("1:layers.0", {"output": "tensor"}), ("layers.0", {"input": "tensor"})]
        selection = select(dict(targets if numbered_first else targets[::-1]), self.FIRST, self.SECOND)
        assert selection.module(0, "layers.0") == choices(input=TensorChoice(True, 1, None))
        assert selection.module(1, "layers.0") == choices(output=TensorChoice(True, 1, None))


class TestTargetsThatMatchNothing:
    """Peers' fault 18: they were passed over in silence."""

    NAMES = ChunkNames(("", "h", "h.mlp", "ln_f"), ("h.mlp.w",))

    def test_each_is_given_with_the_names_nearest_to_it(self) -> None:
        selection = select(["h.mpl", "ln_f", "zzzz"], self.NAMES)
        assert selection.unmatched == (Unmatched("h.mpl", ("h.mlp", "h.mlp.w")), Unmatched("zzzz", ()))

    def test_all_are_named_in_one_message(self) -> None:
        assert select(["h.mpl", "ln_f", "zzzz"], self.NAMES).warning() == (
            "Targets that match nothing in this model (in a pipeline: in this rank's stages): "
            "'h.mpl' (nearest: 'h.mlp', 'h.mlp.w'), 'zzzz'. Nothing is recorded for them. "
            'Set "print_struct": true to write all names to module_struct.json.'
        )

    def test_what_does_match_is_watched_all_the_same(self) -> None:
        assert modules(select(["h.1.mpl", "h.10"])) == ["h.10"]

    def test_if_nothing_matches_nothing_is_watched(self) -> None:
        selection = select(["zzzz"])
        assert modules(selection) == []
        assert parameters(selection) == []

    def test_the_nearest_names_can_be_used_as_they_stand(self) -> None:
        first, second = ChunkNames(("", "layers.0"), ()), ChunkNames(("", "layers.5"), ())
        for target in ("0:layers.5", "7:layers.5", "layers.6", "1:layers.6"):
            (unmatched,) = select([target], first, second).unmatched
            assert unmatched.nearest
            assert select(unmatched.nearest, first, second).unmatched == ()

    def test_a_target_in_the_wrong_chunk_is_answered_with_the_right_one(self) -> None:
        first, second = ChunkNames(("", "layers.0"), ()), ChunkNames(("", "layers.5"), ())
        assert select(["0:layers.5"], first, second).unmatched[0].nearest[0] == "1:layers.5"

    def test_hundreds_are_all_named_and_the_first_ones_explained(self) -> None:
        selection = select([f"h.1.mlp{i}" for i in range(300)])
        assert len(selection.unmatched) == 300
        assert [bool(one.nearest) for one in selection.unmatched] == [True] * MAX_EXPLAINED + [False] * (300 - MAX_EXPLAINED)
        assert "'h.1.mlp299'" in (selection.warning() or "")

    def test_they_keep_the_order_of_the_configuration(self) -> None:
        assert [one.target for one in select(["0:zz", "yy", "1:xx"]).unmatched] == ["0:zz", "yy", "1:xx"]


COMPONENTS = ("1", "10", "h", "h1", "layer", "layers", "norm", "w")
paths = st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=4).map(".".join)


@st.composite
def models(draw: st.DrawFn) -> ChunkNames:
    """Random parameters and the modules above them, as a framework would list them."""
    leaves = draw(st.lists(paths, min_size=1, max_size=10, unique=True))
    inner = dict.fromkeys(above for leaf in leaves for above in [*parents(leaf)][::-1])
    return ChunkNames(tuple(inner), tuple(leaf for leaf in leaves if leaf not in inner))


class TestProperties:
    @given(models(), st.data())
    def test_a_target_selects_by_dotted_prefix_and_nothing_else(self, names: ChunkNames, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from([*names.modules, *names.parameters]))
        selection = select([target], names)
        below = [name for name in names.parameters if not target or f"{name}.".startswith(f"{target}.")]
        assert parameters(selection, names=names) == below
        assert modules(selection, names=names) == [name for name in names.modules if name == target]

    @given(models(), st.data())
    def test_several_targets_select_what_each_selects(self, names: ChunkNames, data: st.DataObject) -> None:
        targets = data.draw(st.lists(st.sampled_from([*names.modules, *names.parameters]), min_size=1, unique=True))
        together, apart = select(targets, names), [select([target], names) for target in targets]
        for name in names.parameters:
            assert together.parameter(0, name) == any(one.parameter(0, name) for one in apart)
        for name in names.modules:
            assert (together.module(0, name) is not None) == (name in targets)

    @given(models(), st.data(), st.integers(0, 2), st.integers(0, 2))
    def test_leading_modules_never_matter(self, names: ChunkNames, data: st.DataObject, on_names: int, on_target: int) -> None:
        target = data.draw(st.sampled_from([*names.modules[1:], *names.parameters]))
        wrapped = ChunkNames(
            *([f"{'module.' * on_names}{name}" for name in kind] for kind in (names.modules[1:], names.parameters))
        )
        plain, spelled = select([target], names), select(["module." * on_target + target], wrapped)
        for name, long in zip(names.parameters, wrapped.parameters, strict=True):
            assert plain.parameter(0, name) == spelled.parameter(0, long)
        for name, long in zip(names.modules[1:], wrapped.modules, strict=True):
            assert plain.module(0, name) == spelled.module(0, long)

    @given(models())
    def test_the_spelling_in_rows_selects_the_same_as_the_full_name(self, names: ChunkNames) -> None:
        for name, short in squashed([*names.modules, *names.parameters]).items():
            full, spelled = select([name], names), select([short], names)
            assert spelled.unmatched == ()
            assert parameters(spelled, names=names) == parameters(full, names=names)
            assert modules(spelled, names=names) == modules(full, names=names)

    @given(
        st.lists(models(), min_size=1, max_size=3),
        st.lists(st.text("019:.hw", max_size=6), min_size=1, max_size=5, unique=True),
    )
    def test_a_target_is_unmatched_exactly_if_on_its_own_it_selects_nothing(
        self, chunks: list[ChunkNames], targets: list[str]
    ) -> None:
        expected = []
        for target in targets:
            alone = select([target], *chunks)
            found = [(modules(alone, i, names), parameters(alone, i, names)) for i, names in enumerate(chunks)]
            if not any(some or others for some, others in found):
                expected.append(target)
        assert [one.target for one in select(targets, *chunks).unmatched] == expected


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("h.*", ["h.1", "h.10"]),
            ("h.*.mlp", ["h.1.mlp", "h.10.mlp"]),
            ("**.mlp", ["h.1.mlp", "h.10.mlp"]),
            ("**.h.#", ["h.1", "h.10"]),
            ("**.#.*", ["h.1.mlp", "h.10.mlp"]),
            ("**.ln#", []),
            ("h.1*", ["h.1", "h.10"]),
            ("h**", ["h", "h.1", "h.1.mlp", "h.10", "h.10.mlp"]),
            ("*", ["h", "ln_f"]),
            ("*.1.m?p", []),
            ("h.+", []),
        ],
    )
    def test_stars_stand_for_characters_of_a_component_or_for_components(self, pattern: str, found: list[str]) -> None:
        assert modules(select([pattern])) == found

    def test_parameters_below_what_is_found_are_watched(self) -> None:
        assert parameters(select(["h.*.mlp"])) == ["h.1.mlp.weight", "h.1.mlp.bias", "h.10.mlp.weight"]
        assert parameters(select(["**.weight"])) == ["h.1.mlp.weight", "h.10.mlp.weight", "ln_f.weight"]

    def test_a_name_has_precedence_wherever_it_stands(self) -> None:
        for targets in ({"h.1": {"output": "tensor"}, "h.*": {}}, {"h.*": {}, "h.1": {"output": "tensor"}}):
            selection = select(targets)
            assert selection.module(0, "h.1") == choices(output=TensorChoice(wanted=True, length=1))
            assert selection.module(0, "h.10") == EVERYTHING

    def test_a_wrapper_around_the_model_changes_nothing(self) -> None:
        wrapped = ChunkNames([f"module.{name}".rstrip(".") for name in MODULES], [f"module.{name}" for name in PARAMETERS])
        assert modules(select(["h.*.mlp"], wrapped), names=wrapped) == ["module.h.1.mlp", "module.h.10.mlp"]

    def test_all_takes_any_number_of_tensors_of_a_side(self) -> None:
        selection = select({"h.1": {"output": "all"}})
        assert selection.module(0, "h.1") == choices(output=ALL_TENSORS)

    def test_several_matches_cause_no_notice_and_none_a_warning(self) -> None:
        assert select(["h.*"]).notice() is None
        assert "'x.*'" in str(select(["x.*"]).warning())
