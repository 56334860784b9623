"""What the original's documents write into a configuration, and the strict model does not take."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from monitor.config import ConfigError, MonitorConfig, load_config, model


class Loader:
    """Loads configurations and keeps what was warned of."""

    def __init__(self, directory: Path, log: pytest.LogCaptureFixture) -> None:
        self.path = directory / "config.json"
        self._log = log

    def __call__(self, content: Any) -> tuple[MonitorConfig, list[str]]:
        self._log.clear()
        self.path.write_text(content if isinstance(content, str) else json.dumps(content))
        config = load_config(self.path)
        said = "\n".join(record.getMessage() for record in self._log.records if record.levelno == logging.WARNING)
        return config, [line.strip() for line in said.removeprefix(f"{self.path}: ").split("\n") if line]


@pytest.fixture
def load(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Loader:
    monkeypatch.delenv("DYNAMIC_MONITOR", raising=False)
    return Loader(tmp_path, caplog)


class TestUpdateHistograms:
    @pytest.mark.parametrize(
        "formats", [{}, {"format": "csv"}, {"format": ["api", "csv"]}, {"format": "xml"}, {"format": None}]
    )
    def test_they_are_left_out_where_no_format_holds_them_and_the_rest_is_recorded(
        self, load: Loader, formats: dict[str, Any]
    ) -> None:
        config, said = load({**formats, "ur_distribution": True, "wg_distribution": True})
        assert (config.ur_distribution, config.wg_distribution) == (False, True)
        assert 'line 1: ur_distribution: histograms need "hdf5" or "parquet" or "tensorboard" among the formats.' in " ".join(
            said
        )

    @pytest.mark.parametrize("formats", ["hdf5", ["csv", "tensorboard"], ["xml", "hdf5"]])
    def test_they_stay_where_one_does(self, load: Loader, formats: object) -> None:
        config, said = load({"ur_distribution": True, "format": formats})
        assert config.ur_distribution
        assert not any("ur_distribution" in one for one in said)


class TestFormats:
    @pytest.mark.parametrize(
        ("asked", "used"),
        [
            ("CSV", ("csv",)),
            ("", ("csv",)),
            ("xml", ("csv",)),
            (["xml"], ("csv",)),
            (["xml", "api"], ("api",)),
            (["hdf5", "xml"], ("hdf5",)),
        ],
    )
    def test_one_that_does_not_exist_is_left_out_and_none_left_is_csv(
        self, load: Loader, asked: object, used: tuple[str, ...]
    ) -> None:
        config, said = load({"format": asked})
        assert used == config.formats
        assert len(said) == 1
        assert said[0].startswith("line 1: format: ")
        assert f"Written instead: {', '.join(used)}." in said[0]


class TestNull:
    @pytest.mark.parametrize(
        "content",
        [
            {"format": None},
            {"ndigits": None},
            {"eps": None},
            {"ops": None},
            {"append_output": None},
            {"targets": None},
            {"sa_order": None},
            {"l2_targets": {"attention_hook": None}},
            {"cc_distribution": {"cc_codeline": None}},
            {"alert": None},
            {"alert": {"rules": None}},
        ],
        ids=str,
    )
    def test_a_field_that_is_null_is_not_set_and_the_warning_names_it(self, load: Loader, content: dict[str, Any]) -> None:
        config, said = load(content)
        assert config.model_dump() == MonitorConfig().model_dump()
        path, inner = next(iter(content.items()))
        name = path if inner is None else f"{path}.{next(iter(inner))}"
        assert said == [f"line 1: {name}: null means not set. The default is used."]

    def test_null_arguments_of_a_rule_are_none(self, load: Loader) -> None:
        config, said = load({"alert": {"rules": [{"rule_name": "AnomalyNan", "args": None}]}})
        assert config.alert.rules[0].args.threshold is None
        assert said == ["line 1: alert.rules[0].args: null means no arguments."]

    def test_a_rule_that_needs_arguments_is_still_refused(self, load: Loader) -> None:
        with pytest.raises(ConfigError, match="AnomalyTurbulence needs"):
            load({"alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": None}]}})

    def test_an_argument_of_another_rule_is_refused_by_name(self, load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(cast("dict[str, Any]", model.RULE_ARGUMENTS), "AnomalyNan", ((), ()))
        with pytest.raises(ConfigError, match="AnomalyNan has no argument threshold"):
            load({"alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 3}}]}})

    @pytest.mark.parametrize("field", ["wg_distribution", "step_interval", "collect_times", "squash_name"])
    def test_a_switch_and_a_number_of_steps_cannot_be_null(self, load: Loader, field: str) -> None:
        with pytest.raises(ConfigError, match=field):
            load({field: None})


class TestWholeNumbersWithAnExponent:
    @pytest.mark.parametrize(
        ("field", "text", "value"),
        [
            ("collect_times", "1e8", 100_000_000),
            ("collect_times", "1E8", 100_000_000),
            ("start_step", "1.5e3", 1500),
            ("step_interval", "1e2", 100),
            ("ndigits", "1e1", 10),
            ("step_count_per_record", "5e0", 5),
        ],
    )
    def test_they_are_integers_and_the_warning_says_which(self, load: Loader, field: str, text: str, value: int) -> None:
        config, said = load(f'{{"{field}": {text}}}')
        found = getattr(config, field)
        assert (value, int) == (found, type(found))
        assert said == [f"line 1: {field}: {text} is read as the integer {value}."]

    @pytest.mark.parametrize("text", ["1.0", "1e-1", "15e-1", '"1e8"'])
    def test_what_is_no_whole_number_or_has_no_exponent_stays_an_error(self, load: Loader, text: str) -> None:
        with pytest.raises(ConfigError, match="collect_times"):
            load(f'{{"collect_times": {text}}}')


@pytest.mark.parametrize("order", ["b, s, h, d", " b,s,h,d ", "b ,s\\t,h,d"])
def test_an_order_of_dimensions_may_have_spaces(load: Loader, order: str) -> None:
    config, said = load(f'{{"sa_order": "{order}"}}')
    assert config.sa_order == "b,s,h,d"
    assert said[0].endswith('is read as "b,s,h,d".')


def test_every_change_is_named_in_one_warning_in_the_order_of_the_lines(load: Loader) -> None:
    _, said = load('{\n"ndigits": null,\n"collect_times": 1e8,\n"format": "xml"\n}')
    assert [one.split(":")[0] for one in said] == ["accepted with changes", "line 2", "line 3", "line 4"]


def test_what_the_model_takes_is_not_warned_of(load: Loader) -> None:
    assert load({"ndigits": 12, "format": "csv", "collect_times": 5, "sa_order": "b,s,h,d"})[1] == []


def test_a_typo_is_refused_beside_what_is_tolerated(load: Loader) -> None:
    with pytest.raises(ConfigError, match="did you mean `wg_distribution`"):
        load({"format": None, "wg_distributon": True})
