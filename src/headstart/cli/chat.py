"""`headstart chat`: a conversation in the terminal, with each answer's TTFT and prefix hit beside it."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from contextlib import ExitStack

with contextlib.suppress(
    ImportError
):  # a Python without it reads lines the terminal's way: 4,095 characters, no editing
    import readline  # noqa: F401 (makes input() edit, recall and paste)

import click
from rich.console import Console
from rich.markup import escape

from headstart.cli.client import AddressError, Answer, Client, Message, ServerError
from headstart.cli.errors import CommandError
from headstart.cli.failure import show_error
from headstart.cli.local_server import LocalServer
from headstart.cli.show import ledger_table, one_line
from headstart.config import DEFAULT_MODEL

_COMMANDS = "/reset starts anew, /ledger shows where the last TTFT went, /quit ends"


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no temperature.", ctx, param)
    return value


@click.command()
@click.argument("model", required=False)
@click.option(
    "--url", envvar="HEADSTART_URL", help="A running server, such as http://127.0.0.1:8000. [default: start one]"
)
@click.option("--api-key", envvar="HEADSTART_API_KEY", help="Key for the server at --url.")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer. [default: the server's]")
@click.option("--temperature", type=click.FloatRange(0), callback=_finite, help="0 is greedy. [default: the server's]")
def chat(
    model: str | None,
    url: str | None,
    api_key: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Chat with MODEL: on a running server (--url), or on one that this command starts and stops.

    In the terminal, /reset starts anew, /ledger shows where the last TTFT went and /quit ends. Lines piped in are
    answered one by one: answers go to stdout, their timing to stderr.
    """
    asked = {"max_tokens": max_tokens, "temperature": temperature}
    options = {key: value for key, value in asked.items() if value is not None}
    try:
        with ExitStack() as stack:
            if url is None:
                server = stack.enter_context(LocalServer(model or DEFAULT_MODEL, ["--log-level", "warning"]))
                client = server.client
            else:
                client = Client(url, api_key=api_key)
            name = model if model and url else client.models()[0]
            Conversation(client, name, system, options).run()
    except AddressError as error:
        raise click.UsageError(str(error)) from error
    except ServerError as error:
        raise CommandError(str(error)) from error


class Conversation:
    """The messages so far and the terminal they are shown in."""

    def __init__(self, client: Client, model: str, system: str | None, options: dict[str, int | float]) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._notes = Console(stderr=True, highlight=False)
        self._interactive = sys.stdin.isatty()
        self._last: Answer | None = None

    def run(self) -> None:
        """Until /quit or the end of the input."""
        if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text must not end the conversation
            sys.stdin.reconfigure(errors="replace")
        if self._interactive:
            self._notes.print(f"[dim]{self._model} at {self._client.base_url} · {_COMMANDS}[/]")
        while (line := self._read()) is not None:
            if line and not self._command(line):
                self._turn(line)

    def _read(self) -> str | None:
        """The next line; None at the end or at /quit."""
        try:
            line = (input("\n› ") if self._interactive else input()).strip()
        except (EOFError, KeyboardInterrupt):
            return None
        return None if line == "/quit" else line

    def _command(self, line: str) -> bool:
        """Whether the line was a command, which is then done."""
        if line == "/reset":
            self._messages = list(self._opening)
            self._notes.print("[dim]a new conversation[/]")
        elif line == "/ledger":
            self._notes.print(ledger_table(self._last, "Last answer") if self._last else "[dim]no answer yet[/]")
        elif line.startswith("/") and self._interactive:
            self._notes.print(f"[dim]unknown command {escape(line)}: {_COMMANDS}[/]")
        else:
            return False
        return True

    def _turn(self, line: str) -> None:
        question: Message = {"role": "user", "content": line}
        try:
            answer = self._client.chat(self._model, [*self._messages, question], on_text=_write, **self._options)
        except KeyboardInterrupt:  # closing the connection stops the answer; the question is dropped
            self._notes.print("\n[dim]stopped[/]")
            return
        except ServerError as error:
            if not self._interactive:
                raise
            show_error(str(error))
            return
        click.echo()
        self._messages += [question, {"role": "assistant", "content": answer.text}]
        self._last = answer
        self._notes.print(f"[dim]{one_line(answer)}[/]")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
