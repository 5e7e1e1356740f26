"""Writes a GGUF file in another format with llama.cpp's own quantizer; runs where llama-cpp-python is.

python _llama_quantize.py SOURCE TARGET f16|q8_0|q4_0
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

TYPES = {
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def main() -> int:
    source, target, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    params.nthread = 2
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    raise SystemExit(main())
