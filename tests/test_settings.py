from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import Config, ConfigError
from headstart.settings import HELP, SETTINGS, FlagError, did_you_mean, parse_bytes, settle


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_default_configuration() -> None:
    assert settle({}, {}) == Config()


def test_each_field_of_the_configuration_can_be_set() -> None:
    named = {(setting.section, setting.name) for setting in SETTINGS}
    config = Config()
    expected = {
        (section.name, item.name) for section in fields(config) for item in fields(getattr(config, section.name))
    }
    assert named == expected | {("server", "api_key_file")}
    assert set(HELP) == {name for _, name in named}, "each setting has a help text, and each text a setting"


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "h.toml", "[server]\nport = 1001\nhost = 'filehost'\nmax_n = 3\n")
    env = {"HEADSTART_PORT": "1002", "HEADSTART_HOST": "envhost"}
    config = settle({"port": 1003}, env, file)
    assert (config.server.port, config.server.host, config.server.max_n) == (1003, "envhost", 3)
    assert config.server.max_logprobs == Config().server.max_logprobs


def test_every_kind_of_value_from_a_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "h.toml",
        """
        [model]
        model = "some/model"
        dtype = "bfloat16"
        [cache]
        kv_cache_memory = "2GiB"
        prefix_cache = false
        [scheduler]
        priority_step_ms = 500
        [server]
        max_body_bytes = 2048
        cors_origins = ["https://a.example", "https://b.example"]
        """,
    )
    config = settle({}, {}, file)
    assert config.model.model == "some/model"
    assert config.model.dtype == "bfloat16"
    assert config.cache.kv_cache_memory == 2 << 30
    assert config.cache.prefix_cache is False
    assert config.scheduler.priority_step_ms == 500.0
    assert config.server.max_body_bytes == 2048
    assert config.server.cors_origins == ("https://a.example", "https://b.example")


def test_every_kind_of_value_from_the_environment() -> None:
    env = {
        "HEADSTART_MODEL": "m",
        "HEADSTART_PREFIX_CACHE": "off",
        "HEADSTART_KV_CACHE_MEMORY": "1.5GiB",
        "HEADSTART_AGING_MS": "1e3",
        "HEADSTART_MAX_NUM_SEQS": "8",
        "HEADSTART_POLICY": "srpf",
        "HEADSTART_CORS_ORIGIN": "https://a.example, https://b.example",
    }
    config = settle({}, env)
    assert config.model.model == "m"
    assert config.cache.prefix_cache is False
    assert config.cache.kv_cache_memory == 3 << 29
    assert config.scheduler.aging_ms == 1000.0
    assert config.scheduler.max_num_seqs == 8
    assert config.server.cors_origins == ("https://a.example", "https://b.example")


def test_the_file_may_be_named_by_the_environment_and_a_flag_wins(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", "[server]\nport = 1\n")
    two = write(tmp_path / "two.toml", "[server]\nport = 2\n")
    env = {"HEADSTART_CONFIG": str(one)}
    assert settle({}, env).server.port == 1
    assert settle({}, env, two).server.port == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1\n", r"unknown key prot in \[server\]; did you mean port\?"),
        ("[sever]\nport = 1\n", r"unknown section \[sever\]; did you mean server\?"),
        ("[server]\npolicy = 'fcfs'\n", r"unknown key policy in \[server\]; it belongs into \[scheduler\]"),
        ("[server]\nzzzzzz = 1\n", r"unknown key zzzzzz in \[server\]; known are api_key_file, .*port"),
        ("server = 1\n", r"server must be a table"),
        ("[server]\nport = '80'\n", r"\[server\] port: '80' is not a whole number"),
        ("[server]\nport = true\n", r"port: True is not a whole number"),
        ("[cache]\nprefix_cache = 1\n", r"prefix_cache: 1 is not true or false"),
        ("[cache]\nkv_cache_memory = '2 gigs'\n", r"kv_cache_memory: '2 gigs' is not a size"),
        ("[server]\ncors_origins = 'x'\n", r"cors_origins: 'x' is not a list of strings"),
        ("[scheduler]\npolicy = 'sjf'\n", r"policy: 'sjf' is not one of fcfs, srpf"),
        ("[scheduler]\naging_ms = 'x'\n", r"aging_ms: 'x' is not a number"),
        ("[server]\nport = 99999\n", r"port is 99999; it must be from 0 to 65535"),
        ("[server\n", r"is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        settle({}, {}, write(tmp_path / "h.toml", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*absent\.toml: No such file"):
        settle({}, {}, tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("HEADSTART_PROT", "1", r"unknown environment variable HEADSTART_PROT; did you mean HEADSTART_PORT\?"),
        ("HEADSTART_PORT", "eighty", r"HEADSTART_PORT: 'eighty' is not a whole number"),
        ("HEADSTART_AGING_MS", "soon", r"HEADSTART_AGING_MS: 'soon' is not a number"),
        ("HEADSTART_PREFIX_CACHE", "maybe", r"HEADSTART_PREFIX_CACHE: 'maybe' is neither true nor false"),
        ("HEADSTART_DTYPE", "fp8", r"HEADSTART_DTYPE: 'fp8' is not one of auto, float32"),
        ("HEADSTART_AGING_MS", "nan", r"aging_ms is nan"),
    ],
)
def test_a_mistake_in_the_environment_is_named(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        settle({}, {variable: text})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"policy": "fcfs", "aging_ms": 5.0}, r"aging_ms has no effect with policy fcfs"),
        ({"policy": "fcfs", "aging_factor": 5.0}, r"aging_factor has no effect with policy fcfs"),
        ({"policy": "fcfs", "srpf_weight": 5.0}, r"srpf_weight has no effect with policy fcfs"),
        ({"device": "cuda", "threads": 2}, r"threads has no effect with device cuda"),
    ],
)
def test_an_option_without_effect_is_refused(flags: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        settle(flags, {})


def test_keys_from_a_file_are_added_to_the_others(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", "# for the team\nalpha\n\n  beta  \n")
    assert settle({"api_keys": ("gamma",), "api_key_file": str(keys)}, {}).server.api_keys == ("gamma", "alpha", "beta")
    assert settle({}, {"HEADSTART_API_KEY_FILE": str(keys)}).server.api_keys == ("alpha", "beta")


def test_a_server_meant_to_be_closed_never_comes_up_open(tmp_path: Path) -> None:
    empty = write(tmp_path / "keys", "# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        settle({"api_key_file": str(empty)}, {})
    with pytest.raises(ConfigError, match="cannot read the API key file"):
        settle({"api_key_file": str(tmp_path / "absent")}, {})
    with pytest.raises(ConfigError, match="set but empty"):
        settle({}, {"HEADSTART_API_KEY": " , "})
    with pytest.raises(ConfigError, match="set but empty"):
        settle({"api_keys": ("",)}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1024", 1024),
        ("2GiB", 2 << 30),
        ("4 GB", 4_000_000_000),
        ("1.5KiB", 1536),
        ("3kB", 3000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 Gib", "1e3", "1,5GiB", "2GiBs", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except ConfigError:
        return
    assert size >= 0


def test_the_nearest_name_or_all_of_them() -> None:
    assert did_you_mean("ports", ["port", "host"]) == "did you mean port?"
    assert did_you_mean("xyz", ["port", "host"]) == "known are host, port"


def test_the_example_file_is_valid() -> None:
    example = Path(__file__).parents[1] / "examples" / "headstart.toml"
    assert settle({}, {}, example).cache.kv_cache_memory == 1 << 30


@pytest.mark.parametrize(
    "origin",
    ["x y", "", "app.example", "https://", "https://a.example/", "https://A.example", "http://a:80", "https://a:443"],
)
def test_an_origin_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins has"):
        settle({"cors_origins": (origin,)}, {})


def test_origins_as_browsers_send_them() -> None:
    origins = ("*", "https://a.example", "http://localhost:3000", "http://[::1]:8080", "http://a:443", "app://x")
    assert settle({"cors_origins": origins}, {}).server.cors_origins == origins


@pytest.mark.parametrize("name", ["", "  "])
def test_a_served_name_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match="served_model_name is empty"):
        settle({}, {"HEADSTART_SERVED_MODEL_NAME": name})


@pytest.mark.parametrize("key", ["clé", "a\tb", "a\n", " padded"])
def test_a_key_that_no_header_carries_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        settle({"api_keys": ("good", key)}, {})
    assert key not in str(caught.value)


def test_flags_are_at_fault_only_if_it_works_without_them(tmp_path: Path) -> None:
    file = write(tmp_path / "h.toml", "[scheduler]\npolicy = 'fcfs'\n")
    with pytest.raises(FlagError, match="aging_ms has no effect"):
        settle({"aging_ms": 1.0}, {}, file)
    for flags in ({}, {"port": 1}):
        with pytest.raises(ConfigError) as caught:
            settle(flags, {"HEADSTART_MAX_N": "0"}, file)
        assert not isinstance(caught.value, FlagError)
