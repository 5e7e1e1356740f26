"""The official `openai` client against a running server (`headstart serve`): streaming, usage, the TTFT ledger.

pip install openai
python examples/openai_client.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    client = OpenAI(base_url=f"{base_url}/v1", api_key="unused unless the server asks for one")
    model = client.models.list().data[0].id
    response = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    # The headers arrive with the first token, so they already carry the ledger.
    print("Server-Timing:", response.headers.get("Server-Timing"))
    for chunk in response.parse():
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
