"""The llama.cpp side of `vs_llama_cpp.py`; runs in an environment that has llama-cpp-python and nothing of ours.

Reads one JSON command a line: `{"token_ids": [...], "num_decode": n}`; answers `{"prefill_s": ..., "decode_s": ...}`.
Prefill ends when the last token's logits are there and their argmax is known, as a server's first token would.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from llama_cpp import Llama


def next_token(llm: Llama) -> int:
    logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
    return int(logits.argmax())


def measure(llm: Llama, token_ids: list[int], num_decode: int) -> dict[str, float]:
    llm.reset()
    began = time.perf_counter()
    llm.eval(token_ids)
    token = next_token(llm)
    first = time.perf_counter()
    for _ in range(num_decode):
        llm.eval([token])
        token = next_token(llm)
    return {"prefill_s": first - began, "decode_s": time.perf_counter() - first}


def main() -> None:
    options = json.loads(sys.argv[1])
    llm = Llama(
        model_path=options["model"],
        n_ctx=options["n_ctx"],
        n_batch=512,
        n_ubatch=512,
        n_threads=options["threads"],
        n_threads_batch=options["threads"],
        flash_attn=options["flash_attn"],
        logits_all=False,
        verbose=False,
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(llm, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
