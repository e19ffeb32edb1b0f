"""penstock's engine beside llama.cpp, OpenVINO GenAI and transformers, in one process each and in turn.

    python tools/engine_peers.py FOLDER --peers-python PYTHON [--rounds 2] [--threads 2] [--json OUT]

FOLDER is a Qwen3 checkpoint in bfloat16 (`tools/make_checkpoint.py qwen3-0.6b FOLDER`). PYTHON is of an environment
with llama-cpp-python (compiled from source), gguf, openvino-genai, optimum-intel and transformers; whoever is missing
there is left out. What they read (GGUF in bfloat16, OpenVINO's own) is written beside the checkpoint once.

Of each: output tokens/s of one stream (from two lengths of the same prompt), tokens/s of reading a prompt of 1,000
tokens, and output tokens/s of 16 prompts of 128 tokens with 64 tokens of output that are handed in at once. Medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ONE, LONG, MANY, OUT = 128, 1000, 16, 64
VOCABULARY = 8000  # ids below it are texts in every tokenizer here
Generate = Callable[[list[list[int]], int], int]  # prompts, output tokens of each -> output tokens of all


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def measure(generate: Generate) -> dict[str, float]:
    """Tokens per second."""

    def seconds(batch: list[list[int]], out: int) -> float:
        began = time.perf_counter()
        brought = generate(batch, out)
        assert brought == len(batch) * out, (brought, len(batch), out)
        return time.perf_counter() - began

    seconds(prompts(1, ONE, 0), 4)
    short = [seconds(prompts(1, ONE, i), 1) for i in range(1, 4)]
    full = [seconds(prompts(1, ONE, i), 1 + OUT) for i in range(4, 7)]
    long = [seconds(prompts(1, LONG, i), 1) for i in range(7, 10)]
    many = [seconds(prompts(MANY, ONE, i), OUT) for i in range(10, 12)]
    return {
        "decode_1": OUT / (statistics.median(full) - statistics.median(short)),
        "prefill": LONG / statistics.median(long),
        "output_16": MANY * OUT / statistics.median(many),
    }


@contextmanager
def penstock(folder: Path, threads: int) -> Iterator[Generate]:
    from penstock import LLM, SamplingParams

    llm = LLM(str(folder), max_model_len=2048, prefix_cache=False)

    def generate(batch: list[list[int]], out: int) -> int:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=out)
        return sum(len(r.outputs[0].token_ids) for r in llm.generate(batch, params))

    yield generate


@contextmanager
def transformers(folder: Path, threads: int) -> Iterator[Generate]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    @torch.inference_mode()
    def generate(batch: list[list[int]], out: int) -> int:
        ids = torch.tensor(batch)
        mask = torch.ones_like(ids)
        found = model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, min_new_tokens=out, max_new_tokens=out
        )
        return found[:, ids.shape[1] :].numel()

    yield generate


@contextmanager
def llama_cpp(folder: Path, threads: int) -> Iterator[Generate]:
    import ctypes

    import llama_cpp as c

    file = folder / "bf16.gguf"
    if not file.exists():
        write_gguf(folder, file)
    c.llama_backend_init()
    model = c.llama_model_load_from_file(str(file).encode(), c.llama_model_default_params())
    settings = c.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 8192, 4096, 512, MANY
    settings.n_threads = settings.n_threads_batch = threads
    settings.kv_unified = True
    context = c.llama_init_from_model(model, settings)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch_of = c.llama_batch_init(4096, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, whether its logits are wanted) -> the greedy tokens that were."""
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch_of.token[i], batch_of.pos[i] = token, position
            batch_of.n_seq_id[i], batch_of.seq_id[i][0], batch_of.logits[i] = 1, sequence, wanted
        batch_of.n_tokens = len(entries)
        assert c.llama_decode(context, batch_of) == 0
        found = []
        for i, entry in enumerate(entries):
            if entry[3]:
                row = ctypes.cast(c.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float * vocabulary))
                found.append(greedy(row.contents))
        return found

    def generate(batch: list[list[int]], out: int) -> int:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        last = len(batch[0]) - 1
        tokens = decode([(t, p, s, p == last) for s, prompt in enumerate(batch) for p, t in enumerate(prompt)])
        for step in range(1, out):
            tokens = decode([(token, last + step, s, True) for s, token in enumerate(tokens)])
        return out * len(batch)

    yield generate


def greedy(row: Any) -> int:
    import numpy as np

    return int(np.frombuffer(row, dtype=np.float32).argmax())


@contextmanager
def openvino(folder: Path, threads: int) -> Iterator[Generate]:
    import numpy as np
    import openvino
    import openvino_genai

    exported = folder / "openvino"
    if not (exported / "openvino_model.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--task"]
        command += ["text-generation-with-past", "--weight-format", "fp16", "--model", str(folder), str(exported)]
        subprocess.run(command, check=True, capture_output=True)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2, 2048, False
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(exported), scheduler, "CPU", properties)

    def generate(batch: list[list[int]], out: int) -> int:
        params = openvino_genai.GenerationConfig()
        params.max_new_tokens, params.min_new_tokens, params.ignore_eos, params.do_sample = out, out, True, False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in batch]
        return sum(len(r.m_generation_ids[0]) for r in pipeline.generate(inputs, [params] * len(batch)))

    yield generate


def write_gguf(folder: Path, file: Path) -> None:
    """A Qwen3 checkpoint as llama.cpp reads it: matrices in bfloat16, norms in float32."""
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    words = {number: word for word, number in tokenizer["vocab"].items()}
    tokens = [words.get(number, f"<unused {number}>") for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["merges"]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 - a handle is no mapping
            tensor, found = source.get_tensor(name), names.get_name(name, try_suffixes=(".weight",))
            if tensor.ndim == 1:
                writer.add_tensor(found, tensor.float().numpy())
            else:
                raw = tensor.view(torch.uint16).numpy()
                writer.add_tensor(found, raw.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PEERS = {"penstock": penstock, "llama.cpp": llama_cpp, "openvino": openvino, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--peers", default=",".join(PEERS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with PEERS[args.one](args.folder, args.threads) as generate:
            print(json.dumps(measure(generate)))
        return
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for name in args.peers.split(","):
            if (found := ask(name, args)) is not None:
                rounds.setdefault(name, []).append(found)
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in rounds.items()
    }
    show(medians)
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "rounds": rounds}, indent=1) + "\n")


def ask(name: str, args: argparse.Namespace) -> dict[str, float] | None:
    """One peer's figures, from a process of its own; None, and a line that says why, when it cannot."""
    python = sys.executable if name == "penstock" else args.peers_python
    command = [python, __file__, str(args.folder), "--one", name, "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}", file=sys.stderr)
        return None
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def show(medians: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="tokens/s; in brackets penstock's as a multiple")
    table.add_column("engine")
    for title in ("one stream", f"reading {LONG}", f"{MANY} at once"):
        table.add_column(title, justify="right")
    ours = medians.get("penstock")
    for name, figures in medians.items():
        row = [
            f"{value:.1f}" + (f" ({ours[key] / value:.2f})" if ours and name != "penstock" else "")
            for key, value in figures.items()
        ]
        table.add_row(name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
