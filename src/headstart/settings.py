"""Settings: command line, environment, TOML file and defaults -> one validated `Config`.

Owns the names under which a configuration field is reached (`--max-num-seqs`, `HEADSTART_MAX_NUM_SEQS`, `[scheduler]
max_num_seqs`), how a value is read from text, which source wins (flag > environment > file > default), and the errors
for unknown or inert names. Knows nothing of what the fields mean to the engine, nor of the command-line library.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headstart.config import Config, ConfigError, validate

Kind = Literal["text", "integer", "number", "bytes", "switch", "choice", "list"]

ENV_PREFIX = "HEADSTART_"
API_KEY_FILE = "api_key_file"  # beside the fields of `Config`: a file whose lines are added to `api_keys`
CONFIG_VARIABLE = "HEADSTART_CONFIG"  # names the TOML file itself
_OTHER_VARIABLES = {CONFIG_VARIABLE, "HEADSTART_CACHE"}  # the latter is read by `headstart.hub`

HELP = {
    "model": "Folder, .gguf file, hub id or built-in alias.",
    "served_model_name": "Name that clients use for the model. [default: the model as given]",
    "device": "Where the model runs.",
    "dtype": "Type of weights and activations; auto: float32 on cpu, the checkpoint's own on cuda.",
    "quantization": "How matrices are held; auto: as the checkpoint has them, float ones as int8 where kernels allow.",
    "max_model_len": "Longest prompt plus answer, in tokens. [default: the model's context, or what the KV pool holds]",
    "threads": "Compute threads. [default: the cores this process may use]",
    "generation_config": "Where sampling fields that a request leaves out come from: the model's own file, or nowhere.",
    "block_size": "Tokens a KV block.",
    "kv_cache_dtype": "Type of the KV pool; auto: the model's, or float16 instead of float32 beside quantized weights.",
    "kv_cache_memory": "Memory of the KV pool, such as 2GiB. [default: half of what is free after loading]",
    "kv_ram": "Host memory for KV blocks that leave an accelerator's pool, such as 8GiB.",
    "kv_disk": "Folder for KV blocks that leave memory; they are found again after a restart.",
    "kv_disk_size": "Most that its files take. [default: 16GiB]",
    "prefix_cache": "Reuse the KV blocks of shared prefixes.",
    "policy": "Who goes first: srpf (shortest uncached prefill, with ageing), fcfs (arrival) or edf (deadline).",
    "max_num_batched_tokens": "Tokens in a step, at most.",
    "slo_tpot_ms": "What a step that also decodes may take: lower means smaller gaps in running streams.",
    "max_chunk_ms": "What a step without decodes may take: lower means that newcomers wait less.",
    "attention_horizon": "Context whose attention costs as much as a token's other work. [default: the model's]",
    "max_num_seqs": "Requests that hold KV blocks at once.",
    "max_num_waiting": "Queued requests; more are refused with status 429.",
    "aging_ms": "srpf: how long, past its turn by arrival, a request may be passed by shorter ones.",
    "srpf_weight": "srpf: seconds that each second of predicted prefill puts a request back.",
    "aging_factor": "srpf: or, if that is more, so many times its own predicted prefill.",
    "slo_ttft_ms": "When the first token is due, for requests that do not say.",
    "on_slo_miss": "queue, or reject with status 429 a request whose SLO is predicted to be missed.",
    "priority_step_ms": "Waiting time that one level of priority is worth.",
    "pipeline_depth": "Steps in flight: 2 overlaps scheduling with compute. [default: 1 on cpu, 2 on cuda]",
    "step_timeout_s": "Seconds after which a step counts as stuck, and the engine as lost.",
    "host": "Address to listen on.",
    "port": "Port to listen on; 0 takes a free one.",
    "api_keys": "A key that clients must send as a bearer token; repeat for several.",
    API_KEY_FILE: "File with API keys, one a line.",
    "cors_origins": "Origin that browsers may call from, or *; repeat for several.",
    "max_body_bytes": "Largest body, such as 16MiB. [default: 1MiB + 32 bytes a token of context, up to 16MiB]",
    "max_n": "Largest n (answers a request).",
    "max_logprobs": "Largest top_logprobs.",
    "max_priority": "Requests may ask for a priority from -N (goes first) to N.",
    "default_max_tokens": "Answer length when a request names none. [default: up to the context]",
    "token_memory": "Memory for the tokens of recent texts, such as 64MiB, so that a next turn tokenizes its end only.",
    "explain": "Say in every answer why its prompt missed the prefix cache, not only where a header asks for it.",
    "explain_memory": "Memory for recent prompts that new ones are compared with for that, such as 32MiB; 0: none.",
    "step_log": "File that every step is appended to, as JSON: its work, how long it took, how long it was thought to.",
    "log_level": "How much the server logs.",
}
_BYTES = {"kv_cache_memory", "kv_disk_size", "kv_ram", "max_body_bytes", "token_memory", "explain_memory"}
_FLAGS = {"api_keys": "--api-key", "cors_origins": "--cors-origin"}  # repeated, hence named in the singular
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letters in enumerate(["kK", "M", "G", "T"])
    for letter in letters
    for suffix, base in (("B", 1000), ("iB", 1024))
}
# As browsers write the Origin header (https://html.spec.whatwg.org/#ascii-serialisation-of-an-origin).
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://([a-z0-9._~-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
# Fields that only work with a certain value of another field: (field, the other field, its value)
_NEEDS = (
    ("aging_ms", "policy", "srpf"),
    ("aging_factor", "policy", "srpf"),
    ("srpf_weight", "policy", "srpf"),
    ("threads", "device", "cpu"),
)


class FlagError(ConfigError):
    """The flags are at fault: without them the configuration works."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One configurable field and the names it goes by."""

    section: str  # attribute of `Config` and table of the TOML file
    name: str  # field of the section and key of the table
    kind: Kind
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return _FLAGS.get(self.name, "--" + self.name.replace("_", "-"))

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def help(self) -> str:
        return HELP[self.name]


def _kind(name: str, hint: Any) -> tuple[Kind, tuple[str, ...]]:
    """How a field of this type is read, and its choices."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal:
        return "choice", get_args(hint)
    if get_origin(hint) is tuple:
        return "list", ()
    if name in _BYTES:
        return "bytes", ()
    kinds: dict[Any, Kind] = {str: "text", int: "integer", float: "number", bool: "switch"}
    return kinds[hint], ()


def _describe() -> tuple[Setting, ...]:
    found = []
    defaults = Config()
    for section in fields(Config):
        values = getattr(defaults, section.name)
        hints = get_type_hints(type(values))
        for item in fields(values):
            kind, choices = _kind(item.name, hints[item.name])
            found.append(Setting(section.name, item.name, kind, getattr(values, item.name), choices))
            if item.name == "api_keys":
                found.append(Setting(section.name, API_KEY_FILE, "text", None))
    return tuple(found)


SETTINGS: tuple[Setting, ...] = _describe()
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"


def parse_bytes(text: str) -> int:
    """`"2GiB"` -> 2147483648. Suffixes kB MB GB TB (powers of 1000) and KiB MiB GiB TiB (of 1024); none: bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write a number of bytes or a size such as 512MiB, 2GiB or 4GB")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def parse_text(setting: Setting, text: str) -> Any:
    """A value from the environment; lists are separated by commas. `ConfigError` does not name the setting yet."""
    try:
        if setting.kind == "integer":
            return int(text)
        if setting.kind == "number":
            return float(text)
    except ValueError:
        wanted = "a whole number" if setting.kind == "integer" else "a number"
        raise ConfigError(f"{text!r} is not {wanted}") from None
    if setting.kind == "bytes":
        return parse_bytes(text)
    if setting.kind == "switch":
        return _parse_switch(text)
    if setting.kind == "choice":
        return _check_choice(setting, text)
    if setting.kind == "list":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _parse_switch(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def _check_choice(setting: Setting, text: str) -> str:
    if text not in setting.choices:
        raise ConfigError(f"{text!r} is not one of {', '.join(setting.choices)}")
    return text


def from_value(name: str, value: object) -> Any:
    """The setting `name` from a caller's Python value, of the types that the TOML file takes. Raises `ConfigError`."""
    try:
        return _from_toml(_BY_NAME[name], value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _from_toml(setting: Setting, value: object) -> Any:
    """A value from a TOML file, whose types are strict except that a size may be a string."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if setting.kind == "bytes" and isinstance(value, str):
        return parse_bytes(value)
    if setting.kind in ("integer", "bytes") and is_integer:
        return value
    if setting.kind == "number" and (is_integer or isinstance(value, float)):
        return float(value)  # type: ignore[arg-type]
    if setting.kind == "switch" and isinstance(value, bool):
        return value
    if setting.kind == "list" and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if setting.kind == "choice" and isinstance(value, str):
        return _check_choice(setting, value)
    if setting.kind == "text" and isinstance(value, str):
        return value
    wanted = {
        "integer": "a whole number",
        "number": "a number",
        "bytes": "a size such as 2GiB",
        "list": "a list of strings",
    }
    wanted |= {"switch": "true or false", "text": "a string", "choice": "one of " + ", ".join(setting.choices)}
    raise ConfigError(f"{value!r} is not {wanted[setting.kind]}")


def read_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file by field name. Raises `ConfigError` naming the file and the key."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    sections = {setting.section for setting in SETTINGS}
    values = {}
    for section, table in document.items():
        if section not in sections:
            raise ConfigError(f"{path}: unknown section [{section}]; {did_you_mean(section, sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a table: write [{section}] on a line of its own")
        known = {setting.name: setting for setting in SETTINGS if setting.section == section}
        for key, value in table.items():
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key} in [{section}]; {_whereabouts(key, section, known)}")
            try:
                values[key] = _from_toml(known[key], value)
            except ConfigError as error:
                raise ConfigError(f"{path}: [{section}] {key}: {error}") from None
    return values


def _whereabouts(key: str, section: str, known: Iterable[str]) -> str:
    """Where a key that is unknown in `section` was probably meant to go."""
    if key in _BY_NAME:
        return f"it belongs into [{_BY_NAME[key].section}]"
    return did_you_mean(key, known)


def read_env(env: Mapping[str, str]) -> dict[str, Any]:
    """The settings among environment variables by field name. Raises `ConfigError` naming the variable."""
    known = {setting.env: setting for setting in SETTINGS}
    values = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable not in known:
            raise ConfigError(
                f"unknown environment variable {variable}; {did_you_mean(variable, {*known, *_OTHER_VARIABLES})}"
            )
        try:
            values[known[variable].name] = parse_text(known[variable], text)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
    return values


def read_keys(path: Path) -> tuple[str, ...]:
    """API keys from a file: one a line; empty lines and lines that start with # are left out."""
    try:
        lines = [line.strip() for line in path.expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API key file {path}: {getattr(error, 'strerror', None) or error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"the API key file {path} holds no key; write one a line")
    return keys


def settle(flags: Mapping[str, Any], env: Mapping[str, str], file: Path | None = None) -> Config:
    """One validated configuration from all sources.

    `flags`: values by field name, without the flags that were not given. `file`: a TOML file; else the one that
    `HEADSTART_CONFIG` names. Raises `ConfigError` for anything unknown, unreadable, out of range or without effect, as
    a `FlagError` where it works without the flags.
    """
    try:
        return _settle(flags, env, file)
    except ConfigError as error:
        if flags and _works(env, file):
            raise FlagError(str(error)) from None
        raise


def _works(env: Mapping[str, str], file: Path | None) -> bool:
    try:
        _settle({}, env, file)
    except ConfigError:
        return False
    return True


def _settle(flags: Mapping[str, Any], env: Mapping[str, str], file: Path | None) -> Config:
    if file is None and env.get(CONFIG_VARIABLE):
        file = Path(env[CONFIG_VARIABLE])
    given = (read_file(file) if file is not None else {}) | read_env(env) | dict(flags)
    key_file = given.pop(API_KEY_FILE, None)
    if key_file is not None:
        given["api_keys"] = (*given.get("api_keys", ()), *read_keys(Path(key_file)))
    _refuse_open_by_accident(given)
    config = validate(_build(given))
    _refuse_useless(config)
    _refuse_inert(given, config)
    return config


def _build(given: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        sections.setdefault(_BY_NAME[name].section, {})[name] = value
    defaults = Config()
    return Config(**{name: type(getattr(defaults, name))(**values) for name, values in sections.items()})


def _refuse_open_by_accident(given: Mapping[str, Any]) -> None:
    """A server that was meant to ask for a key must not come up without one."""
    keys = given.get("api_keys")
    if keys is not None and (not keys or not all(key.strip() for key in keys)):
        raise ConfigError("an API key is set but empty; give a key, or leave the setting out to serve without keys")


def _refuse_useless(config: Config) -> None:
    """Text that is taken as it is, and that no client could ever send or match."""
    name = config.model.served_model_name
    if name is not None and not name.strip():
        raise ConfigError("served_model_name is empty; give a name, or leave it out to use the model's")
    for key in config.server.api_keys:
        if not (key.isascii() and key.isprintable() and key == key.strip()):  # not shown: it is a secret
            raise ConfigError(
                "an API key has characters that no HTTP header can carry, or blanks around it; use printable ASCII only"
            )
    for origin in config.server.cors_origins:
        match = _ORIGIN.fullmatch(origin)
        if origin != "*" and (match is None or match["port"] == _DEFAULT_PORTS.get(match["scheme"], "")):
            raise ConfigError(
                f"cors_origins has {origin!r}, which no browser sends; write * or scheme://host[:port] in lower case, "
                "without the scheme's own port and without a path, such as https://app.example"
            )


def _refuse_inert(given: Mapping[str, Any], config: Config) -> None:
    for name, other, value in _NEEDS:
        actual = getattr(getattr(config, _BY_NAME[other].section), other)
        if name in given and actual != value:
            raise ConfigError(f"{name} has no effect with {other} {actual}; leave it out, or set {other} to {value}")
