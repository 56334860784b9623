"""The configuration: what is read from a file, what is refused, and how that is said."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from monitor.config import ConfigError, MonitorConfig, TensorSpec, load_config
from monitor.config.loading import configuration_of

Load = Callable[[Any], MonitorConfig]
Refused = Callable[[Any], str]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _static_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMIC_MONITOR", raising=False)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a file that holds the given text, bytes, or JSON of anything else."""

    def load_text(content: Any) -> MonitorConfig:
        path = tmp_path / "config.json"
        if not isinstance(content, str | bytes):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_config(path)

    return load_text


@pytest.fixture
def problems(load: Load, tmp_path: Path) -> Refused:
    """What the error says about the given content, without the file's name."""

    def refused(content: Any) -> str:
        with pytest.raises(ConfigError) as error:
            load(content)
        return str(error.value).replace(f"{tmp_path / 'config.json'}: ", "", 1)

    return refused


class TestDefaults:
    def test_an_empty_object_gives_every_default(self, load: Load) -> None:
        assert load("{}").model_dump(mode="json") == {
            "targets": {},
            "dynamic_on": False,
            "start_step": 0,
            "collect_times": 100_000_000,
            "step_interval": 1,
            "intervals": {
                "xy_distribution": 1,
                "wg_distribution": 1,
                "param_distribution": 1,
                "mv_distribution": 1,
                "ur_distribution": 1,
                "update_ratio": 1,
                "optimizer_health": 1,
                "mg_direction": 1,
                "cc_distribution": 1,
                "recording_l2_features": 1,
            },
            "print_struct": False,
            "module_ranks": [],
            "ur_distribution": False,
            "xy_distribution": False,
            "all_xy": False,
            "forward_only": False,
            "backward_only": False,
            "mv_distribution": False,
            "param_distribution": False,
            "wg_distribution": False,
            "monitor_mbs_grad": False,
            "wg_reduced_only": False,
            "mg_direction": False,
            "update_ratio": False,
            "optimizer_health": False,
            "cc_distribution": {"enable": False, "cc_codeline": [], "cc_pre_hook": False, "cc_log_only": False},
            "alert": {"rules": [], "dump": False},
            "format": ["csv"],
            "ops": [],
            "eps": 1e-8,
            "ndigits": 6,
            "append_output": [],
            "squash_name": False,
            "stack_info": False,
            "recording_l2_features": False,
            "l2_targets": {
                "attention_hook": [],
                "attention_head_hook": [],
                "linear_hook": None,
                "moe_router_weight_hook": [],
                "moe_router_logit_hook": [],
                "moe_router_load_hook": [],
                "activation_hook": [],
            },
            "sa_order": "s,b,h,d",
            "sa_heads": 1,
            "sa_batch_rows": 1,
            "sa_logit_bound": 100.0,
            "sa_sink_tokens": 1,
            "dead_after_steps": 10,
            "micro_steps": "each",
            "queue_bytes": 256 * MIB,
            "queue_wait_seconds": 1.0,
            "close_seconds": 30.0,
            "signal_seconds": 5.0,
            "max_output_bytes": 0,
            "warn_rows_per_step": 10_000_000,
            "warn_bytes_per_step": 1024 * MIB,
            "warn_files_per_step": 10_000,
            "replica_check": None,
            "on_alert": None,
            "forward": {"to": None, "kinds": [], "names": [], "ops": ["norm"], "most": 200, "file": "", "port": 0},
            "run_numbers": None,
        }
        assert load("{}").step_count_per_record == 1

    def test_a_record_holds_100_steps_of_hdf5_and_one_of_the_rest_unless_it_is_set(self, load: Load) -> None:
        config = load("{}")
        assert tuple(config.steps_per_record(name) for name in ("hdf5", "parquet", "csv", "tensorboard")) == (100, 100, 1, 1)
        config = load({"step_count_per_record": 1})
        assert (config.steps_per_record("hdf5"), config.steps_per_record("csv")) == (1, 1)

    def test_null_and_an_empty_list_of_ranks_both_mean_all(self, load: Load) -> None:
        assert () == load({"module_ranks": None}).module_ranks == load({"module_ranks": []}).module_ranks


class TestFormats:
    def test_one_format_is_a_string(self, load: Load) -> None:
        assert load({"format": "api"}).formats == ("api",)

    def test_several_are_a_list_and_keep_their_order(self, load: Load) -> None:
        assert load({"format": ["api", "csv"]}).formats == ("api", "csv")

    @pytest.mark.parametrize("value", [[], [["csv"]], 1, {}])
    def test_anything_else_is_refused(self, problems: Refused, value: Any) -> None:
        expected = 'is not allowed: expected "csv", "hdf5", "parquet", "tensorboard", "api", or a list of some of them'
        assert f"line 1: format: {json.dumps(value)} {expected}" == problems({"format": value})

    def test_a_format_stands_once(self, problems: Refused) -> None:
        assert problems({"format": ["csv", "csv"]}) == 'line 1: format: ["csv", "csv"] is not allowed: a format occurs twice'


class TestTargets:
    def test_a_target_without_sides_selects_everything(self, load: Load) -> None:
        target = load({"targets": {"h.0": {}}}).targets["h.0"]
        assert target.named == {}

    def test_a_target_with_sides_selects_only_those(self, load: Load) -> None:
        target = load({"targets": {"h.0": {"input": "tuple[2]:0", "output": "tensor"}}}).targets["h.0"]
        assert target.named == {"input": TensorSpec(2, 0), "output": TensorSpec()}

    @pytest.mark.parametrize(
        ("text", "spec"),
        [
            ("tensor", TensorSpec()),
            ("tuple[3]", TensorSpec(3)),
            ("tuple[12]:11", TensorSpec(12, 11)),
            ("tuple[0]", TensorSpec(0)),
        ],
    )
    def test_a_structure_reads_and_prints_the_same(self, text: str, spec: TensorSpec) -> None:
        assert spec == TensorSpec.parse(text)
        assert text == str(spec)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "Tensor",
            "tuple",
            "tuple[]",
            "tuple[-1]",
            "tuple[01]",
            "tuple[2]:",
            "tuple[2]:-1",
            "tuple[2]:0 ",
            "tuple[٢]",
            "list[2]",
        ],
    )
    def test_other_spellings_of_a_structure_are_refused(self, problems: Refused, text: str) -> None:
        said = problems(json.dumps({"targets": {"h.0": {"input": text}}}))
        assert said.startswith('line 1: targets["h.0"].input: ')
        assert said.endswith('is not allowed: expected "tensor", "tuple[N]", "tuple[N]:i" with i below N, or "all"')

    def test_an_index_lies_inside_its_tuple(self, problems: Refused) -> None:
        said = problems({"targets": {"h.0": {"input": "tuple[2]:2"}}})
        assert said.endswith('"tuple[2]:2" is not allowed: a tuple of 2 has no element 2, elements are counted from 0')

    def test_null_is_no_structure(self, problems: Refused) -> None:
        assert problems({"targets": {"h.0": {"input": None}}}).startswith('line 1: targets["h.0"].input: null is not allowed')


class TestStrictness:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("step_interval", "1"),
            ("step_interval", True),
            ("step_interval", 1.0),
            ("step_interval", None),
            ("wg_distribution", 1),
            ("wg_distribution", "true"),
            ("wg_distribution", None),
            ("eps", "1e-8"),
            ("eps", True),
            ("ops", "norm"),
            ("ops", [1]),
            ("ops", {"norm": True}),
            ("targets", []),
            ("targets", ["h.0"]),
            ("targets", {"h.0": None}),
            ("module_ranks", 0),
            ("module_ranks", ["0"]),
            ("module_ranks", [False]),
            ("micro_steps", ["each"]),
            ("alert", []),
            ("cc_distribution", True),
        ],
    )
    def test_a_value_has_the_type_of_its_field(self, problems: Refused, field: str, value: Any) -> None:
        assert problems({field: value}).startswith(f"line 1: {field}")

    @pytest.mark.parametrize("field", ["eps", "queue_wait_seconds", "close_seconds", "signal_seconds"])
    def test_an_integer_serves_where_a_float_is_asked_for(self, load: Load, field: str) -> None:
        value = getattr(load({field: 2}), field)
        assert (2.0, float) == (value, type(value))

    def test_the_case_of_a_name_matters(self, problems: Refused) -> None:
        assert problems({"Step_Interval": 1}) == "line 1: Step_Interval: unknown field, did you mean `step_interval`?"

    def test_a_config_cannot_be_changed(self, load: Load) -> None:
        with pytest.raises(ValidationError):
            load("{}").step_interval = 2


class TestBounds:
    @pytest.mark.parametrize(
        ("field", "lowest", "highest"),
        [
            ("start_step", 0, 2**63 - 1),
            ("collect_times", 0, 2**63 - 1),
            ("step_interval", 1, 2**63 - 1),
            ("step_count_per_record", 1, 2**63 - 1),
            ("ndigits", 0, 17),
            ("queue_bytes", MIB, 2**63 - 1),
            ("queue_wait_seconds", 0, 86_400),
            ("close_seconds", 0, 86_400),
            ("signal_seconds", 0, 86_400),
            ("warn_rows_per_step", 0, 2**63 - 1),
            ("warn_bytes_per_step", 0, 2**63 - 1),
            ("warn_files_per_step", 0, 2**63 - 1),
        ],
    )
    def test_a_number_lies_between_its_bounds(
        self, load: Load, problems: Refused, field: str, lowest: int, highest: int
    ) -> None:
        for bound in (lowest, highest):
            assert bound == getattr(load({field: bound}), field)
        for beyond in (lowest - 1, highest + 1):
            assert f"line 1: {field}: {beyond} is not allowed: expected a" in problems({field: beyond})

    @pytest.mark.parametrize("eps", [0, 0.0, -1e-8])
    def test_eps_is_above_zero(self, problems: Refused, eps: float) -> None:
        assert f"line 1: eps: {eps} is not allowed: expected a number above 0" == problems({"eps": eps})

    def test_the_smallest_eps_is_the_smallest_float(self, load: Load) -> None:
        assert math.ulp(0.0) == load({"eps": math.ulp(0.0)}).eps

    def test_ranks_are_not_negative(self, problems: Refused) -> None:
        said = problems({"module_ranks": [0, -1]})
        assert said == "line 1: module_ranks[1]: -1 is not allowed: expected an integer from 0 to 2^31 - 1"

    @pytest.mark.parametrize(
        "text",
        [
            "Dez03_21-34-40",
            "dec03_21-34-40",
            "Dec3_21-34-40",
            "Dec32_21-34-40",
            "Feb30_00-00-00",
            "Dec03_24-00-00",
            "Dec03 21:34:40",
        ],
    )
    def test_a_timestamp_is_a_moment_with_an_english_month(self, problems: Refused, text: str) -> None:
        said = problems({"append_output": [text, "Dec03_21-34-41"]})
        assert f'line 1: append_output[0]: "{text}" is not allowed: expected a timestamp like Dec03_21-34-40' in said

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_range_has_two_timestamps(self, problems: Refused, count: int) -> None:
        said = problems({"append_output": ["Dec03_21-34-40"] * count})
        assert 'expected "auto", [] or two timestamps' in said

    @pytest.mark.parametrize("value", ["latest", "", ["auto", "auto"], ["auto", "Dec03_21-34-40"], True, {}])
    def test_what_to_append_to_is_automatic_or_a_range_and_nothing_else(self, problems: Refused, value: object) -> None:
        (line,) = [line for line in problems({"append_output": value}).splitlines() if "append_output" in line][:1]
        assert "is not allowed: expected" in line

    def test_another_word_than_auto_is_refused_in_one_line_that_names_what_is_allowed(self, problems: Refused) -> None:
        said = problems({"append_output": "latest"})
        assert 'append_output: "latest" is not allowed: expected "auto", [] or two timestamps like Dec03_21-34-40' in said

    def test_a_code_line_is_a_regular_expression(self, problems: Refused) -> None:
        assert 'cc_codeline[0]: "train.py[" is not allowed: it is not a regular expression' in problems(
            {"cc_distribution": {"cc_codeline": ["train.py["]}}
        )

    def test_turbulence_needs_a_threshold_and_nan_does_not(self, problems: Refused) -> None:
        said = problems({"alert": {"rules": [{"rule_name": "AnomalyNan"}, {"rule_name": "AnomalyTurbulence"}]}})
        assert said.startswith("line 1: alert.rules[1]: ")
        assert said.endswith('is not allowed: AnomalyTurbulence needs "args": {"threshold": ...}')

    def test_a_field_without_a_default_may_not_be_missing(self, problems: Refused) -> None:
        assert (
            problems({"alert": {"rules": [{}]}})
            == 'line 1: alert.rules[0].rule_name is missing: expected "AnomalyTurbulence", "AnomalyNan" or "AnomalyBounds"'
        )


class TestIntervals:
    @pytest.mark.parametrize("interval", [0, -1, 1.5, "2", True, None])
    def test_an_interval_is_a_whole_number_from_one_on(self, problems: Refused, interval: Any) -> None:
        said = problems({"intervals": {"xy_distribution": interval}})
        assert "intervals.xy_distribution" in said
        assert "expected an integer from 1" in said

    def test_a_kind_has_the_name_of_its_switch(self, problems: Refused) -> None:
        assert "did you mean `xy_distribution`" in problems({"intervals": {"xy_distributions": 10}})

    @pytest.mark.parametrize(("gradients", "direction", "fits"), [(2, 4, True), (2, 2, True), (2, 3, False), (2, 1, False)])
    def test_a_direction_is_compared_where_gradients_are_read(
        self, load: Load, problems: Refused, gradients: int, direction: int, fits: bool
    ) -> None:
        intervals = {"wg_distribution": gradients, "mg_direction": direction}
        config = {"wg_distribution": True, "mg_direction": True, "intervals": intervals}
        if fits:
            assert load(config).intervals.mg_direction == direction
        else:
            assert "intervals.wg_distribution is 2. Set intervals.mg_direction to 2 or a multiple" in problems(config)
        assert load({**config, "wg_distribution": False}).mg_direction


class TestUnknownFields:
    """peers fault 18: a field that does not exist was passed over in silence."""

    def test_peers_fault_18_an_unknown_field_is_an_error_with_the_nearest_name(self, problems: Refused) -> None:
        assert problems({"wg_distributon": True}) == "line 1: wg_distributon: unknown field, did you mean `wg_distribution`?"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ({"targets": {"h.0": {"inputs": "tensor"}}}, 'targets["h.0"].inputs: unknown field, did you mean `input`?'),
            ({"cc_distribution": {"codeline": []}}, "cc_distribution.codeline: unknown field, did you mean `cc_codeline`?"),
            (
                {"alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"treshold": 1}}]}},
                "alert.rules[0].args.treshold: unknown field, did you mean `threshold`?",
            ),
            ({"l2_targets": {"linear": []}}, "l2_targets.linear: unknown field, did you mean `linear_hook`?"),
            (
                {"on_alert": {"set": {"xy_distribtion": True}, "steps": 5}},
                "on_alert.set.xy_distribtion: unknown field, did you mean `xy_distribution`?",
            ),
            ({"alert": {"q": 1}}, "alert.q: unknown field, known here are `rules` and `dump`"),
            ({"zzz": 1}, "zzz: unknown field, docs/configuration.md lists all fields"),
        ],
    )
    def test_so_it_is_at_any_depth(self, problems: Refused, content: Any, said: str) -> None:
        assert f"line 1: {said}" == problems(content)

    @pytest.mark.parametrize("name", ["wg", "xy", "steps", "micro_step", "opt_ty", "module_rank", "formats", "__init__"])
    def test_alternative_spellings_are_not_guessed(self, problems: Refused, name: str) -> None:
        assert "unknown field" in problems({name: True})


class TestMessages:
    def test_all_problems_are_listed_in_the_order_of_the_file(self, problems: Refused) -> None:
        said = problems('{\n  "step_interval": 0,\n  "targets": {\n    "h.0": {"input": 3}\n  },\n  "wgd": 1,\n  "eps": "x"\n}')
        assert said.split("\n") == [
            "several problems",
            "  line 2: step_interval: 0 is not allowed: expected an integer from 1 to 2^63 - 1",
            '  line 4: targets["h.0"].input: 3 is not allowed: expected "tensor", "tuple[N]", "tuple[N]:i" with i below N, or '
            '"all"',
            "  line 6: wgd: unknown field, docs/configuration.md lists all fields",
            '  line 7: eps: "x" is not allowed: expected a number above 0',
        ]

    def test_a_long_value_is_cut(self, problems: Refused) -> None:
        assert f'line 1: ops: "{"x" * 55} ... is not allowed: expected a list, each item a string' == problems(
            {"ops": "x" * 1000}
        )

    def test_of_very_many_problems_the_first_are_listed_and_the_rest_counted(self, problems: Refused) -> None:
        said = problems({f"unknown{i}": 1 for i in range(1000)}).split("\n")
        assert (len(said), said[0], said[-1]) == (22, "several problems", "  and 980 others")

    def test_the_message_knows_no_validator(self, problems: Refused) -> None:
        said = problems({"targets": 1, "ops": 1, "eps": None, "alert": {"rules": [1]}, "sa_order": 1, "x": 1, "on_alert": 1})
        assert all(word not in said for word in ("pydantic", "http", "type=", "input_value", "validation error", "tuple_type"))

    def test_the_original_error_is_not_shown_as_its_cause(self, load: Load) -> None:
        with pytest.raises(ConfigError) as error:
            load({"x": 1})
        assert error.value.__suppress_context__


class TestSyntax:
    def test_comments_and_trailing_commas_are_welcome(self, load: Load) -> None:
        config = load(
            '// the first line\n{ /* several\n lines */ "targets": {"h.0": {},}, // a module\n'
            '  "ops": ["norm", /* and */ "min",],\n}\n// the last'
        )
        assert (tuple(config.targets), config.ops) == (("h.0",), ("norm", "min"))

    def test_peers_fault_18_comment_marks_inside_strings_stay(self, load: Load) -> None:
        names = ["http://h.0", "/* h.1 */", 'a "quoted" // name', "back\\slash\\", ",]", "{,}"]
        assert names == list(load({"targets": {name: {} for name in names}}).targets)

    @pytest.mark.parametrize(
        ("text", "line", "column", "message"),
        [
            ("", 1, 1, "Expecting value"),
            ("{", 1, 2, "expected a name in double quotes"),
            ("{'ops': []}", 1, 2, "expected a name in double quotes"),
            ("{,}", 1, 2, "expected a name in double quotes"),
            ('{"ops": [,]}', 1, 10, "Expecting value"),
            ('{"ops": ["min",,]}', 1, 16, "Expecting value"),
            ('{\n  "eps" 1\n}', 2, 9, 'expected ":" after the name'),
            ('{\n  "eps": 1\n  "ops": []\n}', 3, 3, 'expected "," or "}"'),
            ('{"ops": ["min" "max"]}', 1, 16, 'expected "," or "]"'),
            ('{"eps": 1}\n}', 2, 1, "unexpected text after the end of the JSON value"),
            ('{"eps": 01}', 1, 10, 'expected "," or "}"'),
            ('{"eps": .5}', 1, 9, "Expecting value"),
            ('{"eps": True}', 1, 9, "Expecting value. In JSON, it is true, in lower case"),
            ('{"wg_distribution": False}', 1, 21, "Expecting value. In JSON, it is false, in lower case"),
            ('{"ops": [None]}', 1, 10, "Expecting value. In JSON, it is null, in lower case"),
            ('{"eps": Truest}', 1, 9, "Expecting value"),
            ('// one\n/* two\n*/ {"eps": }', 3, 12, "Expecting value"),
            ('{"eps": 1} /* open', 1, 12, "the comment that begins here is never closed"),
            ('{"ops": ["min]}', 1, 10, "Unterminated string starting at"),
            ('{"eps": NaN}', 1, 9, "NaN is not a JSON number"),
            ('{"eps": Infinity}', 1, 9, "Infinity is not a JSON number"),
            ('{"eps": -Infinity}', 1, 9, "-Infinity is not a JSON number"),
            ('{"eps": 1e999}', 1, 9, "the number is too large for a float64"),
            (f'{{"eps": {"9" * 10_000}}}', 1, 9, "the number has 10000 digits, the limit is 400"),
            ('{"ops": ["\\ud800"]}', 1, 10, "the string contains half of a surrogate pair"),
            ('{"ops": [],\n "eps": 1,\n "ops": ["min"]}', 3, 2, '"ops" occurs twice in the same object'),
            ('{"targets": {"h": {"input": "tensor",\n"input": "tensor"}}}', 2, 1, '"input" occurs twice in the same object'),
            ('{"targets": {"h": {}, "\\u0068": {}}}', 1, 23, '"h" occurs twice in the same object'),
        ],
    )
    def test_peers_fault_18_bad_json_is_reported_with_its_place_in_the_users_file(
        self, problems: Refused, text: str, line: int, column: int, message: str
    ) -> None:
        assert f"line {line}, column {column}: {message}" == problems(text)

    @pytest.mark.parametrize("opening", ["[", '{"a":'])
    def test_deep_nesting_is_refused_before_it_costs_anything(self, problems: Refused, opening: str) -> None:
        assert problems(opening * 100_000).endswith("nested more than 32 levels deep")

    @pytest.mark.parametrize(("text", "found"), [("[]", "[]"), ("3", "3"), ('"{}"', '"{}"'), ("null", "null")])
    def test_the_file_holds_an_object(self, problems: Refused, text: str, found: str) -> None:
        assert f"expected an object in braces, found {found}" == problems(text)

    def test_the_same_name_may_stand_in_two_objects(self, load: Load) -> None:
        assert len(load({"targets": {"a": {"input": "tensor"}, "b": {"input": "tensor"}}}).targets) == 2

    def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(self, load: Load, problems: Refused) -> None:
        assert load(b'\xef\xbb\xbf{\r\n"step_interval": 2 // two\r\n}\r\n').step_interval == 2
        assert problems(b'\xef\xbb\xbf{\r\n"eps":}') == "line 2, column 7: Expecting value"

    def test_a_column_counts_characters(self, problems: Refused) -> None:
        assert problems('{"ü": }') == "line 1, column 7: Expecting value"

    def test_text_that_is_not_utf8_is_named_with_its_line(self, problems: Refused) -> None:
        assert problems('{\n"ü": 1}'.encode("latin-1")) == "line 2: byte 0xfc is not UTF-8, save the file as UTF-8"
        assert problems("{}".encode("utf-16")) == "line 1: byte 0xff is not UTF-8, save the file as UTF-8"


class TestFiles:
    def test_a_leading_tilde_is_the_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "config.json").write_text('{"step_interval": 3}')
        assert load_config("~/config.json").step_interval == 3

    def test_a_missing_file_is_named_by_where_it_was_looked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError) as error:
            load_config("monitor.json")
        assert f"{tmp_path / 'monitor.json'}: there is no such file" == str(error.value)

    @pytest.mark.parametrize("given", [None, 3, ["config.json"]])
    def test_what_is_no_path_and_no_dictionary_is_refused_by_the_name_of_the_argument(self, given: Any) -> None:
        with pytest.raises(ConfigError, match=r"^config_file_path is .*: expected the path of a JSON file, or a dictionary"):
            configuration_of(given)

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="it is a directory, expected a JSON file"):
            load_config(tmp_path)

    def test_what_the_system_refuses_to_read_is_said_with_its_reason(self, tmp_path: Path) -> None:
        loop = tmp_path / "loop.json"
        loop.symlink_to(loop)
        with pytest.raises(ConfigError, match="it cannot be read: Too many levels of symbolic links"):
            load_config(loop)

    def test_a_file_without_permission_is_said_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        # The superuser may read anything, so the refusal itself is played.
        monkeypatch.setattr("builtins.open", refused)
        with pytest.raises(ConfigError, match="it cannot be read: Permission denied"):
            load_config(tmp_path / "config.json")

    @pytest.mark.parametrize("path", ["a\0b", "\ud800.json"])
    def test_what_is_not_a_path_is_said_so(self, path: str) -> None:
        with pytest.raises(ConfigError, match="it is not a path"):
            load_config(path)

    def test_the_message_is_text_even_if_the_file_name_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as error:
            load_config(str(tmp_path) + "/\udcff.json")
        assert str(error.value).encode().endswith(b"\\udcff.json: there is no such file")

    def test_a_checkpoint_given_by_mistake_is_not_read_to_its_end(self, tmp_path: Path) -> None:
        checkpoint = tmp_path / "model.pt"
        with checkpoint.open("wb") as file:
            file.truncate(1 << 40)  # sparse: takes no space
        with pytest.raises(ConfigError, match="it has more than 4194304 bytes, which is too large for a configuration"):
            load_config(checkpoint)


class TestAcrossFields:
    def test_the_model_itself_takes_no_update_histograms_without_a_format_that_holds_them(self) -> None:
        with pytest.raises(
            ValidationError, match='ur_distribution needs "tensorboard" or "parquet" or "hdf5" among the formats'
        ):
            MonitorConfig.model_validate({"ur_distribution": True})

    @pytest.mark.parametrize("name", ["tensorboard", "hdf5", "parquet"])
    def test_either_of_the_two_will_do(self, name: str) -> None:
        assert MonitorConfig.model_validate({"ur_distribution": True, "format": ["csv", name]}).ur_distribution

    @pytest.mark.parametrize("formats", ["csv", ["hdf5", "api"], ["csv", "parquet"]])
    def test_a_bound_on_disk_needs_files_that_can_be_thinned(self, load: Load, formats: Any) -> None:
        assert load({"format": formats, "max_output_bytes": 10**9}).max_output_bytes == 10**9

    def test_a_bound_on_disk_is_refused_beside_event_files(self, problems: Refused) -> None:
        said = problems({"format": ["csv", "tensorboard"], "max_output_bytes": 10**9})
        assert "max_output_bytes" in said
        assert "it needs csv, hdf5 or parquet: files of tensorboard cannot be thinned" in said

    def test_both_directions_off_is_left_to_the_caller(self, load: Load) -> None:
        config = load({"xy_distribution": True, "forward_only": True, "backward_only": True})
        assert (config.forward_only, config.backward_only) == (True, True)

    def test_ops_that_do_not_exist_are_left_to_the_caller(self, load: Load) -> None:
        assert load({"ops": ["norm", "medain"]}).ops == ("norm", "medain")

    @pytest.mark.parametrize(("own", "interval"), [({}, 1), ({"intervals": {"xy_distribution": 3}}, 3)])
    def test_what_an_alert_switches_on_is_in_each_of_its_steps_unless_it_says_otherwise(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], interval: int
    ) -> None:
        monkeypatch.setenv("DYNAMIC_MONITOR", "True")
        rule = {"rules": [{"rule_name": "AnomalyNan"}]}
        on_alert = {"set": {"xy_distribution": True, **own}, "steps": 2}
        intervals = {"xy_distribution": 10, "wg_distribution": 5}
        changes = load({"alert": rule, "on_alert": on_alert, "intervals": intervals}).changes_on_alert()
        assert changes["intervals"]["xy_distribution"] == interval
        assert changes["intervals"].get("wg_distribution", 1) == (1 if own else 5)

    def test_what_an_alert_switches_is_checked_like_the_rest(self, problems: Refused) -> None:
        said = problems({"on_alert": {"set": {"step_interval": 0, "on_alert": None}, "steps": 0}})
        assert said.split("\n") == [
            "several problems",
            "  line 1: on_alert.set.step_interval: 0 is not allowed: expected an integer from 1 to 2^63 - 1",
            "  line 1: on_alert.set.on_alert: unknown field, did you mean `alert`?",
            "  line 1: on_alert.steps: 0 is not allowed: expected an integer from 1 to 2^63 - 1",
        ]


class TestWhatGoesTogether:
    def test_what_is_switched_off_is_not_refused(self, load: Load) -> None:
        off = {"cc_distribution": {"enable": False, "cc_codeline": ["train.py\\[23\\]"]}, "alert": {"rules": [], "dump": True}}
        assert isinstance(load(off | {"append_output": [], "on_alert": None, "l2_targets": {"linear_hook": []}}), MonitorConfig)

    @pytest.mark.parametrize("value", [None, "", "False", "false"])
    def test_dynamic_on_is_ignored_without_its_variable(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, value: str | None
    ) -> None:
        if value is not None:
            monkeypatch.setenv("DYNAMIC_MONITOR", value)
        assert load({"dynamic_on": True}).dynamic_on

    @pytest.mark.parametrize("value", ["True", "true"])
    @pytest.mark.parametrize("dynamic_on", [True, False])
    def test_dynamic_monitoring_may_begin_on_or_off(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, value: str, dynamic_on: bool
    ) -> None:
        monkeypatch.setenv("DYNAMIC_MONITOR", value)
        assert load({"dynamic_on": dynamic_on}).dynamic_on == dynamic_on

    @pytest.mark.parametrize(
        ("field", "asked"),
        [
            ("print_struct", {"print_struct": True}),
            ("cc_distribution.cc_log_only", {"cc_distribution": {"enable": True, "cc_log_only": True}}),
        ],
    )
    def test_what_ends_the_run_does_not_go_with_dynamic_monitoring(
        self, problems: Refused, monkeypatch: pytest.MonkeyPatch, field: str, asked: dict[str, Any]
    ) -> None:
        monkeypatch.setenv("DYNAMIC_MONITOR", "True")
        assert problems(asked) == f"{field}: it ends the run after its first step, unset DYNAMIC_MONITOR to use it"

    def test_on_alert_goes_with_dynamic_monitoring_and_alert_rules_alone(
        self, problems: Refused, load: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = {"on_alert": {"set": {"xy_distribution": True}, "steps": 5}}
        ruled = {**asked, "alert": {"rules": [{"rule_name": "AnomalyNan"}]}}
        said = "on_alert: it changes what is monitored while training runs, which needs DYNAMIC_MONITOR=True"
        assert problems(ruled) == said
        monkeypatch.setenv("DYNAMIC_MONITOR", "True")
        assert problems(asked) == "on_alert: no alert can fire, alert.rules is empty and replica_check is off"
        assert load(ruled).on_alert is not None
        assert load({**asked, "replica_check": True}).on_alert is not None

    def test_reading_moments_after_the_step_needs_moments(self, problems: Refused, load: Load) -> None:
        said = problems({"replica_check": "all"})
        why = '"all" reads the optimizer\'s moments and needs "mv_distribution": true'
        assert said == f'line 1: replica_check: "all" is not allowed: {why}'
        assert load({"replica_check": "all", "mv_distribution": True}).checks_moments_between_steps
        some = problems({"replica_check": "some"})
        assert some == 'line 1: replica_check: "some" is not allowed: expected true, false, "all" or null'

    def test_what_an_alert_would_lead_to_is_checked_before_there_is_one(
        self, problems: Refused, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DYNAMIC_MONITOR", "True")
        asked: dict[str, Any] = {"alert": {"rules": [{"rule_name": "AnomalyNan"}]}, "ops": ["max"]}
        said = problems({**asked, "on_alert": {"set": {"replica_check": True}, "steps": 5}})
        assert said.startswith("on_alert.set: replica_check")
        said = problems({**asked, "on_alert": {"set": {"print_struct": True}, "steps": 5}})
        assert said.startswith("on_alert.set: print_struct: it ends the run")

    def test_the_variable_is_not_guessed_either(self, problems: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DYNAMIC_MONITOR", "1")
        assert problems("{}") == 'environment variable DYNAMIC_MONITOR: "1" is not allowed: expected True or False'


EVERYTHING: dict[str, Any] = {
    "targets": {"h.0": {}, "0:h.1": {"input": "tuple[2]:1", "output_grad": "tensor"}},
    "module_ranks": [0, 3],
    "ur_distribution": True,
    "cc_distribution": {"enable": True, "cc_codeline": ["train.py\\[23\\]"]},
    "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 1}}, {"rule_name": "AnomalyNan"}]},
    "format": ["csv", "hdf5"],
    "ops": ["norm", "min"],
    "append_output": ["Dec31_23-59-59", "Jan01_00-00-01"],
    "l2_targets": {"attention_hook": ["0:h.0.attn"], "linear_hook": []},
    "on_alert": {"set": {"xy_distribution": True, "targets": {"h.0": {"input": "tensor"}}}, "steps": 5},
}


class TestCopies:
    @pytest.mark.parametrize(
        "content", [{}, EVERYTHING, EVERYTHING | {"step_count_per_record": 1}], ids=["empty", "all", "record"]
    )
    @pytest.mark.parametrize(
        "copied",
        [
            pytest.param(copy.deepcopy, id="deepcopy"),
            pytest.param(lambda config: pickle.loads(pickle.dumps(config)), id="pickle"),
            pytest.param(
                lambda config: MonitorConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))), id="json"
            ),
        ],
    )
    def test_a_copy_is_equal_and_behaves_the_same(
        self, content: dict[str, Any], copied: Callable[[MonitorConfig], MonitorConfig]
    ) -> None:
        config = MonitorConfig.model_validate(content)
        twin = copied(config)
        assert config == twin
        assert config.steps_per_record("hdf5") == twin.steps_per_record("hdf5")
        assert config.model_dump_json() == twin.model_dump_json()

    def test_a_dump_of_a_loaded_file_loads_again(self, load: Load) -> None:
        config = load({"targets": {"h.0": {"input": "tuple[2]:1"}}, "ops": ["norm"], "format": "api", "eps": 1e-300})
        assert config == load(config.model_dump(mode="json"))

    def test_what_an_alert_switches_stays_only_what_was_named(self) -> None:
        dumped = MonitorConfig.model_validate(EVERYTHING).model_dump(mode="json")
        assert EVERYTHING["on_alert"] == dumped["on_alert"]
