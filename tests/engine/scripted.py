"""A scripted model: token t is followed by t + 1, and every step waits until the test lets it run.

Run as a program it is an engine process, which `AsyncEngine` cannot tell from a real one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headstart.config import SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.step import ChunkOutput, ModelOutput, SchedulerOutput
from headstart.engine.child import BuiltEngine, run_child
from headstart.engine.ipc import EngineInfo
from headstart.executor.base import ExecutorInfo, StartupError
from headstart.executor.local import LocalExecutor
from headstart.hub import Progress

CRASH_TOKEN = 666  # a prompt that holds it makes the step raise
EXIT_TOKEN = 667  # ... or the process exit without a word
ERROR_TOKEN = 668  # ... or fails this request alone


class Script(msgspec.Struct, frozen=True):
    """What a scripted engine process is like."""

    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 200
    prefix_cache: bool = True
    scheduler: SchedulerConfig = SchedulerConfig()
    step_seconds: float = 0.0  # how long a step takes
    hold_context: int = 1 << 30  # a step with a chunk that reaches this context never ends
    startup_error: str | None = None
    startup_crash: bool = False

    def make_core(self) -> EngineCore:
        return EngineCore(
            self.scheduler,
            LinearCosts(),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            prefix_cache=self.prefix_cache,
        )

    def make_info(self) -> EngineInfo:
        return EngineInfo(self.max_model_len, self.num_blocks, self.block_size, 1 << 16, self.prefix_cache, "scripted")


@dataclass
class CountingWorker:
    """Implements `StepWorker`. `steps` records what it was given; `gate` (if set) is awaited before each step."""

    script: Script
    steps: list[SchedulerOutput] = field(default_factory=list)
    gate: threading.Semaphore | None = None
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def start(self, progress: Any) -> ExecutorInfo:
        script = self.script
        if script.startup_error is not None:
            raise StartupError(script.startup_error)
        if script.startup_crash:
            raise ZeroDivisionError("a bug in loading")
        if progress is not None:
            progress("load", 1, 2)
            progress("load", 2, 2)
        return ExecutorInfo(script.num_blocks, script.block_size, script.max_model_len, 1 << 16, "scripted")

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self.steps.append(step)
        self.entered.release()
        if self.gate is not None:
            self.gate.acquire()
        if self.script.step_seconds:
            time.sleep(self.script.step_seconds)
        for new in step.new_requests:
            self.prompts[new.request_id] = new.prompt_token_ids
        return ModelOutput(step.step_id, tuple(self._compute(chunk) for chunk in step.chunks))

    def _compute(self, chunk: Any) -> ChunkOutput:
        prompt = self.prompts[chunk.request_id]
        end = chunk.start + chunk.num_scheduled_tokens
        if CRASH_TOKEN in prompt:
            raise RuntimeError("the model broke")
        if EXIT_TOKEN in prompt:
            os._exit(3)
        if ERROR_TOKEN in prompt:
            return ChunkOutput(chunk.request_id, error="the logits are not finite")
        if end >= self.script.hold_context:
            threading.Event().wait()
        if not chunk.samples:
            return ChunkOutput(chunk.request_id)
        return ChunkOutput(chunk.request_id, token_ids=(prompt[-1] + end - len(prompt) + 1,))


def expected_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    return [prompt[-1] + 1 + index for index in range(count)]


def build(payload: bytes, progress: Progress) -> BuiltEngine:
    script = msgspec.msgpack.decode(payload, type=Script)
    executor = LocalExecutor(CountingWorker(script), progress)
    executor.start()
    return BuiltEngine(script.make_core(), executor, script.make_info(), script.scheduler.step_timeout_s)


if __name__ == "__main__":
    sys.exit(run_child(int(sys.argv[1]), build))
