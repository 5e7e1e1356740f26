"""What a weight format and a KV format cost in quality: perplexity, KL divergence, top-1 agreement, on given texts.

Teacher-forced: windows of a text, in chunks as a server computes a prompt, by the native kernels; every token but a
window's first is predicted. All is compared with the checkpoint's weights as float32 and a float32 KV cache. Weight
formats are taken with a float32 KV cache; `auto` is what `headstart serve` does with the checkpoint. int8, int4 and fp8
are made from the float32 weights, so that a checkpoint that is quantized already can be compared too: the reference is
then what it was rounded to. KV formats are taken with the default weights, `auto`; with `--kv-weights float32` they
show what they cost alone.

    python benchmarks/quality.py
    python benchmarks/quality.py --weights "" --kv-weights float32
    python benchmarks/quality.py --model FOLDER --text FILE.txt --text QUESTIONS.jsonl --tokens 8192
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from _quality_stats import Quality, Scores, quality
from _verdict import Bar, finish, run_main, show
from gguf_to_f32 import convert
from torch import Tensor

from headstart.bench.options import BenchError
from headstart.config import DEFAULT_MODEL, Quantization
from headstart.hub import ModelFiles, files_of_gguf, resolve
from headstart.kv import KVPool
from headstart.models import Decoder, load_model
from headstart.models.sources import open_source
from headstart.ops import BatchLayout, ChunkSpan, KVFormat, has_native_kernels
from headstart.perf.model_spec import ModelSpec, read_model_spec
from headstart.text import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"  # beside the repository, as the tests' data
TEXTS = ("shakespeare.txt", "gsm8k_test.jsonl")
CHANGE_BAR = 0.01  # of the perplexity, by the default formats
BLOCK_SIZE = 16
SCORED_ROWS = 128  # at a time: logits of a whole window would take hundreds of megabytes a format
REFERENCE, DEFAULT = "float32", "auto"
# name -> dtype, quantization, and whether the checkpoint's own codes are read or its weights as floats
FORMATS: dict[str, tuple[torch.dtype, Quantization, bool]] = {
    REFERENCE: (torch.float32, "none", False),
    DEFAULT: (torch.float32, "auto", True),
    "bfloat16": (torch.bfloat16, "none", False),
    "int8": (torch.float32, "int8", False),
    "int4": (torch.float32, "int4", False),
    "fp8": (torch.float32, "fp8", False),
}


@dataclass(slots=True)
class Candidate:
    """A decoder with a KV pool, and its scores so far."""

    name: str
    decoder: Decoder
    pool: KVPool
    scores: Scores = field(default_factory=Scores)


def read_text(path: Path) -> str:
    """A text file; or the questions and answers of a `.jsonl`, one after the other."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return text
        entries = [json.loads(line) for line in text.splitlines()]
        return "\n\n".join(f"{entry['question']}\n{entry['answer']}" for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} cannot be read as text, or as lines with question and answer: {error}") from None


def windows(ids: Sequence[int], count: int, length: int) -> list[Tensor]:
    """`count` windows of `length` tokens, spread evenly over the text, without overlap."""
    if len(ids) < count * length:
        raise BenchError(f"the text has {len(ids)} tokens, {count * length} are needed: lower --tokens or --context")
    last = len(ids) - length
    starts = [round(last * index / max(1, count - 1)) for index in range(count)]
    return [torch.tensor(ids[start : start + length]) for start in starts]


def layout(start: int, stop: int) -> BatchLayout:
    """One request's tokens [start, stop), its blocks in order."""
    positions = torch.arange(start, stop)
    table = torch.arange(-(-stop // BLOCK_SIZE))
    return BatchLayout(positions, positions, (ChunkSpan(0, stop - start, stop, table),))


def score_window(candidates: Sequence[Candidate], ids: Tensor, chunk: int) -> None:
    """All candidates side by side, the reference first: no logits are kept for longer than a comparison takes."""
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        step = layout(start, stop)
        hidden = {each.name: each.decoder.forward(ids[start:stop], step, each.pool) for each in candidates}
        for first in range(start, min(stop, len(ids) - 1), SCORED_ROWS):
            last = min(first + SCORED_ROWS, stop, len(ids) - 1)
            came = ids[first + 1 : last + 1]
            reference: Tensor | None = None
            for each in candidates:
                logits = each.decoder.logits(hidden[each.name][first - start : last - start])
                logprobs = logits.log_softmax(1)
                reference = logprobs if reference is None else reference
                each.scores.add(logprobs, reference, came)


def load_candidates(
    files: ModelFiles, floats: ModelFiles, spec: ModelSpec, context: int, args: argparse.Namespace
) -> list[Candidate]:
    """The reference, then the weight formats, then the KV formats."""
    decoders: dict[str, Decoder] = {}
    for name in dict.fromkeys((REFERENCE, *args.weights, *([args.kv_weights] if args.kv else []))):
        print(f"loading {name} ...", file=sys.stderr, flush=True)
        dtype, quantization, own = FORMATS[name]
        source = files if own else floats
        decoders[name] = load_model(source, spec, device="cpu", dtype=dtype, quantization=quantization)

    def candidate(name: str, decoder: Decoder, kv_format: KVFormat) -> Candidate:
        pool = KVPool(decoder.kv_layout(BLOCK_SIZE, kv_format), spec.num_layers, -(-context // BLOCK_SIZE), "cpu")
        return Candidate(name, decoder, pool)

    found = [candidate(name, decoder, KVFormat.FLOAT32) for name, decoder in decoders.items()]
    return found + [
        candidate(f"{args.kv_weights}, KV {name}", decoders[args.kv_weights], KVFormat(name)) for name in args.kv
    ]


def float_files(files: ModelFiles, spec: ModelSpec, folder: Path) -> ModelFiles:
    """The model with float weights: itself, or a GGUF file's tensors dequantized to float32."""
    if not open_source(files, spec).formats:
        return files
    if files.format != "gguf":
        raise BenchError(f"{files.name} is quantized and no GGUF file: give the float checkpoint that it was made from")
    target = folder / "float32.gguf"
    convert(files.weights[0], target)
    return files_of_gguf(target)


def take(args: argparse.Namespace, paths: Sequence[Path]) -> Iterator[tuple[str, list[Candidate]]]:
    """Each text's candidates, scored. Weights are loaded once."""
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    files = resolve(args.model, progress=None)
    spec, tokenizer = read_model_spec(files), Tokenizer.load(files)
    context = min(args.context, spec.max_position_embeddings)
    count = max(1, args.tokens // context)
    texts = {path.stem: windows(tokenizer.encode(read_text(path), False), count, context) for path in paths}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HEADSTART_CACHE"] = folder  # formats that are made here are of no use to later starts
        floats = float_files(files, spec, Path(folder))
        candidates = load_candidates(files, floats, spec, context, args)
    for name, of_text in texts.items():
        for each in candidates:
            each.scores = Scores()
        for index, ids in enumerate(of_text):
            print(f"{name}: window {index + 1} of {count}, {context} tokens ...", file=sys.stderr, flush=True)
            score_window(candidates, ids, args.chunk)
        yield name, candidates


def row(text: str, each: Candidate, found: Quality) -> list[str]:
    if each.name == REFERENCE:
        return [text, each.name, f"{found.perplexity:.3f}", "-", "-", "-", "-"]
    return [
        text,
        each.name,
        f"{found.perplexity:.3f}",
        f"{found.change:+.2%} ± {found.change_error:.2%}",
        f"{found.divergence:.2g}",
        f"{found.divergence_p99:.2g}",
        f"{found.agreement:.2%}",
    ]


def names_of(allowed: Sequence[str]) -> type:
    """An argparse type: some of the names, comma-separated; empty for none."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(allowed)}")
        return names

    return parse  # type: ignore[return-value]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kv_formats = [str(each) for each in KVFormat if each is not KVFormat.FLOAT32]
    weights = [name for name in FORMATS if name != REFERENCE]
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"alias, folder or GGUF file (default {DEFAULT_MODEL})")
    parser.add_argument(
        "--text", type=Path, action="append", metavar="FILE",
        help=f"text, or .jsonl with question and answer; may be repeated (default {' and '.join(TEXTS)} in --data)",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the default texts (../shared/data/prompts)")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text (default 2048)")
    parser.add_argument("--context", type=int, default=1024, help="tokens a window (default 1024, at most the model's)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens computed at once (default 512)")
    parser.add_argument("--weights", type=names_of(weights), default=weights, metavar="NAME,…", help=",".join(weights))
    parser.add_argument(
        "--kv", type=names_of(kv_formats), default=kv_formats, metavar="NAME,…", help=",".join(kv_formats)
    )
    parser.add_argument("--kv-weights", choices=tuple(FORMATS), default=DEFAULT, help=f"with --kv (default {DEFAULT})")
    parser.add_argument("--threads", type=int, help="default: the cores there are")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    if min(args.tokens, args.chunk) < 1 or args.context < 2 or (args.threads or 1) < 1:
        parser.error("--tokens, --chunk and --threads must be at least 1, --context at least 2")
    return args


def main() -> int:
    args = parse_args()
    if not has_native_kernels():
        raise BenchError("the native kernels are not built: formats are computed by them alone")
    rows, results, bars = [], {}, []
    for text, candidates in take(args, args.text or [args.data / name for name in TEXTS]):
        found = {each.name: quality(each.scores, candidates[0].scores) for each in candidates}
        rows += [row(text, each, found[each.name]) for each in candidates]
        counts = {each.name: each.scores.num_predictions for each in candidates}
        results[text] = {name: asdict(value) | {"predictions": counts[name]} for name, value in found.items()}
        if DEFAULT in found:
            change = found[DEFAULT].change
            bars.append(
                Bar(
                    f"{text}: perplexity of the default format over float32's, less 1", change, CHANGE_BAR, at_most=True
                )
            )
    columns = ("text", "format", "perplexity", "against float32", "KL, nats", "KL p99", "same top-1")
    show(f"Quality of {args.model}, {args.tokens} tokens a text, contexts to {args.context}", columns, rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
