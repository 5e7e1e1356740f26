"""`make demo`: serve a model, stream two turns of a chat, and show where each one's time to the first token went.

The second turn's prompt repeats the first turn, so its KV blocks come from the prefix cache and only the new words are
computed. Everything goes through the HTTP API, as any client would do it.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.panel import Panel

from headstart.cli.client import Answer, Client, Message, ServerError
from headstart.cli.local_server import LocalServer
from headstart.cli.show import ledger_table, one_line

QUESTIONS = (
    "What does a lighthouse keeper do? Answer in two sentences.",
    "And what is the most beautiful thing about that work?",
)
MAX_TOKENS = 80

console = Console(highlight=False)


def turn(client: Client, model: str, messages: list[Message], number: int) -> Answer:
    """Ask, print the answer as it streams, then its ledger."""
    console.print(f"\n[bold cyan]{number}. user[/]  {messages[-1]['content']}")
    console.print(f"[bold green]{number}. {model}[/]  ", end="")
    answer = client.chat(
        model,
        messages,
        max_tokens=MAX_TOKENS,
        temperature=0,
        on_text=lambda text: console.print(text, end="", markup=False, soft_wrap=True),
    )
    console.print("\n")
    console.print(ledger_table(answer, f"Turn {number}: where the time to the first token went"))
    console.print(f"[dim]{one_line(answer)}[/]")
    return answer


def main(name: str) -> int:
    console.print(f"Starting a server for [bold]{name}[/] ...")
    try:
        with LocalServer(name, ["--log-level", "warning"]) as server:
            model = server.client.models()[0]
            console.print(f"[bold]{model}[/] is ready at {server.client.base_url} after {server.startup_seconds:.1f} s")
            messages: list[Message] = []
            answers = []
            for number, question in enumerate(QUESTIONS, start=1):
                messages.append({"role": "user", "content": question})
                answers.append(turn(server.client, model, messages, number))
                messages.append({"role": "assistant", "content": answers[-1].text})
    except ServerError as error:
        console.print(f"[red]error: {error}[/]")
        return 1
    first, second = answers
    console.print(
        Panel.fit(
            f"Turn 2: a prompt of {second.num_prompt_tokens} tokens, of which {second.num_cached_tokens} came from the "
            f"prefix cache.\nTTFT {first.ttft * 1000:.0f} ms, then {second.ttft * 1000:.0f} ms.",
            title="Prefix hit",
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
