"""The command-line reference in the documentation says what the commands say."""

from __future__ import annotations

from headstart.settings import SETTINGS
from tools.cli_reference import PAGE, render


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make reference`"


def test_each_setting_is_in_it_by_flag_and_variable() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [
        s.name for s in SETTINGS if s.name != "model" and f"`{s.flag}`" not in page and f"`{s.flag}` /" not in page
    ] == []
    assert [s.name for s in SETTINGS if f"`{s.env}`" not in page] == []
