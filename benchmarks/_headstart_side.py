"""Our side of `vs_llama_cpp.py`: the whole engine in process (scheduler, paged cache, sampler), default settings.

Only the KV pool is smaller than by default: one prompt runs at a time, and llama.cpp's is made to measure too.
The protocol is that of `_llama_side.py`.
"""

from __future__ import annotations

import json
import sys
import time

from headstart.config import CacheConfig, Config, ModelConfig
from headstart.core.request import EngineRequest, SamplingParams
from headstart.engine.inprocess import InProcessEngine
from headstart.hub import resolve
from headstart.perf.model_spec import read_model_spec
from headstart.replica import build_engine

KV_CACHE_BYTES = 1 << 30


def measure(
    engine: InProcessEngine, name: str, token_ids: list[int], num_decode: int, num_requests: int = 1
) -> dict[str, float]:
    """Seconds to the first token, and from there to the last. Of several requests: from when all have their first."""
    params = SamplingParams(max_tokens=1 + num_decode, temperature=0.0)
    began = time.monotonic()
    requests = [
        EngineRequest(f"{name}-{index}", (token_ids[index], *token_ids[1:]), params, began)
        for index in range(num_requests)
    ]
    waiting = {request.request_id for request in requests}
    first, num_decoded = None, 0
    for output in engine.run(requests):
        if first is not None:
            num_decoded += len(output.token_ids)
        waiting.discard(output.request_id)
        if first is None and not waiting:
            first = time.monotonic()
    assert first is not None
    return {"prefill_s": first - began, "decode_s": time.monotonic() - first, "num_decoded": num_decoded}


def main() -> None:
    options = json.loads(sys.argv[1])
    files = resolve(options["model"], progress=None)
    config = Config(
        model=ModelConfig(model=options["model"], threads=options["threads"], quantization=options["quantization"]),
        cache=CacheConfig(kv_cache_memory=KV_CACHE_BYTES),
    )
    built = build_engine(config, files, read_model_spec(files))
    with InProcessEngine(built.core, built.executor) as engine:
        print(json.dumps({"ready": True}), flush=True)
        for number, line in enumerate(sys.stdin):
            print(json.dumps(measure(engine, f"r{number}", **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
