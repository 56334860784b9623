"""How modules and parameters are called."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from monitor.selection import WRAPPERS, NearestNames, clean_name, parents, short_name, squashed, without_module

COMPONENTS = (
    "",
    "0",
    "1",
    "a:b",
    "embedding",
    "final_norm",
    "h",
    "layer",
    "layers",
    "module",
    "norm",
    "output",
    "weight",
    "x\ny",
)
dotted = st.lists(st.sampled_from(COMPONENTS), max_size=5).map(".".join)
names = st.lists(dotted, max_size=12)


class TestCleanName:
    @pytest.mark.parametrize(
        ("name", "clean"),
        [
            ("", ""),
            ("_orig_mod", ""),
            ("_orig_mod.h.0.mlp", "h.0.mlp"),
            ("h._checkpoint_wrapped_module.mlp", "h.mlp"),
            ("h.0._fsdp_wrapped_module", "h.0"),
            ("_fsdp_wrapped_module.h.0._orig_mod._checkpoint_wrapped_module.mlp.weight", "h.0.mlp.weight"),
            ("my_orig_mod.x", "my_orig_mod.x"),
        ],
    )
    def test_components_added_by_wrappers_are_gone_wherever_they_stand(self, name: str, clean: str) -> None:
        assert clean_name(name) == clean

    def test_the_component_that_ddp_adds_stays(self) -> None:
        assert clean_name("module._orig_mod.module.h") == "module.module.h"

    @given(st.lists(st.sampled_from([*COMPONENTS, *WRAPPERS])))
    def test_everything_else_stays_as_it_was_and_in_its_order(self, components: list[str]) -> None:
        expected = [component for component in components if component not in WRAPPERS]
        assert clean_name(".".join(components)) == ".".join(expected)


class TestWithoutModule:
    @pytest.mark.parametrize(
        ("name", "bare"),
        [
            ("h.0", "h.0"),
            ("module.h.0", "h.0"),
            ("module.module.h.module.0", "h.module.0"),
            ("module", ""),
            ("module.module", ""),
            ("", ""),
            ("modules.0", "modules.0"),
            ("module_0", "module_0"),
            ("module\n", "module\n"),
        ],
    )
    def test_whole_leading_components_are_gone_and_nothing_else(self, name: str, bare: str) -> None:
        assert without_module(name) == bare


def test_what_stands_above_a_name_is_given_from_the_nearest_to_the_root() -> None:
    assert list(parents("h.10.mlp.weight")) == ["h.10.mlp", "h.10", "h", ""]


def test_nothing_stands_above_the_root() -> None:
    assert list(parents("")) == []


class TestSquashed:
    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("module.encoder.layers.63.mlp", "63.mlp"),
            ("module.decoder.layers.0.self_attention.linear_qkv", "0.self_attention.linear_qkv"),
            ("bert.encoder.layer.3.output.dense", "3.output.dense"),
            ("module.embedding.word_embeddings.weight", "word_embeddings.weight"),
            ("model.embeddings.norm.weight", "norm.weight"),
            ("encoder.layers.0.layers.1", "0.layers.1"),
            ("module.decoder.final_layernorm.weight", "final_layernorm.weight"),
            ("module.decoder.output_layer", "output_layer"),
            ("vision.tower.norm1", "norm1"),
            ("model.output", "output"),
        ],
    )
    def test_a_name_is_shortened_as_the_documents_show_it(self, name: str, short: str) -> None:
        assert squashed([name]) == {name: short}

    @pytest.mark.parametrize(
        "name",
        ["", "h.0.mlp", "module.encoder.layers", "text.embedding", "a.word_embeddings.weight", "a.my_layers.0", "a.mynorm"],
    )
    def test_a_name_without_such_a_component_stays(self, name: str) -> None:
        assert squashed([name]) == {name: name}

    def test_names_that_would_share_a_short_one_all_stay_full(self) -> None:
        names = ["vision.layers.0", "text.layers.0", "text.layers.1"]
        assert squashed(names) == {
            "vision.layers.0": "vision.layers.0",
            "text.layers.0": "text.layers.0",
            "text.layers.1": "1",
        }

    def test_a_name_stays_full_where_its_short_one_is_the_full_name_of_another(self) -> None:
        assert squashed(["norm", "block.norm"]) == {"norm": "norm", "block.norm": "block.norm"}

    def test_a_name_given_twice_does_not_collide_with_itself(self) -> None:
        assert squashed(["a.norm", "a.norm"]) == {"a.norm": "norm"}

    @given(names)
    def test_names_that_differ_are_written_differently(self, names: list[str]) -> None:
        short = squashed(names)
        assert short.keys() == set(names)
        assert len(set(short.values())) == len(short)

    @given(names)
    def test_a_short_name_is_the_end_of_the_full_one_from_a_whole_component_on(self, names: list[str]) -> None:
        for name, short in squashed(names).items():
            assert f".{name}".endswith(f".{short}")

    @pytest.mark.parametrize("other", ["0.mlp", "module.0.mlp"])
    def test_a_name_stays_full_where_its_short_one_would_find_another(self, other: str) -> None:
        assert squashed(["encoder.layers.0.mlp", other])["encoder.layers.0.mlp"] == "encoder.layers.0.mlp"

    @given(names)
    def test_a_name_stays_full_only_for_a_reason(self, names: list[str]) -> None:
        """Among others it is full only if another one claims the same, or is found by it."""
        for name, short in squashed(names).items():
            alone = short_name(name)
            others = [other for other in names if other != name]
            claimed = [other for other in others if alone in (other, short_name(other), without_module(other))]
            assert short == (name if claimed or alone.split(".")[0] == "module" else alone)


class TestNearestNames:
    SMALL = ("", "h", "h.0", "h.0.attn", "h.0.mlp", "h.0.mlp.weight", "ln_f", "ln_f.weight")

    def test_a_misspelt_name_finds_the_one_that_was_meant_first(self) -> None:
        assert NearestNames(self.SMALL).to("h.0.mpl")[0] == "h.0.mlp"

    def test_there_are_at_most_three(self) -> None:
        assert len(NearestNames([f"block{i}" for i in range(9)]).to("block")) == 3

    def test_nothing_is_suggested_where_nothing_is_similar(self) -> None:
        assert NearestNames(self.SMALL).to("zzzz") == ()
        assert NearestNames(()).to("h") == ()

    def test_a_name_given_twice_is_suggested_once(self) -> None:
        assert NearestNames(["wte", "wte"]).to("wt") == ("wte",)

    def test_a_name_that_lacks_its_beginning_is_found(self) -> None:
        assert NearestNames(["model.language.layers.0", "head"]).to("language.layers.0") == ("model.language.layers.0",)

    def test_a_misspelt_component_is_found_among_thousands_of_names(self) -> None:
        names = [f"model.layers.{layer}.{part}" for layer in range(500) for part in ("attn", "mlp.up", "mlp.down")]
        assert NearestNames(names).to("model.layers.431.mlp.dwn")[0] == "model.layers.431.mlp.down"

    def test_among_thousands_of_names_one_that_shares_no_component_is_sought_near_the_root(self) -> None:
        names = [f"layers.{i}" for i in range(5000)]
        assert NearestNames([*names, "embed"]).to("embd") == ("embed",)
