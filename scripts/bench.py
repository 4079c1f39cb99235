"""How fast minigpt is, next to every other engine that is installed: one table, measured in one run.

    python scripts/bench.py [--size 124M | --model FOLDER] [--rounds 5] [--json FILE] [--picture FILE.png]

transformers, llama-cpp-python, ctranslate2 and OpenVINO come with the bench extra (llama-cpp-python wants a compiler).
What an engine needs in a format of its own is made from the model's folder and kept in --work. Each engine lives in its
own process and sleeps while another is measured; in each round, each engine does each work once, and what counts is
the median over the rounds. The time of a decoding step is the median of those between one token of all rows and the
next. All of them decode greedily, with no end token, and use the same threads.

The memory limit of a step is the time to read the weights, and the keys and values of all earlier tokens, once, at the
speed at which torch.sum reads 512 MB with as many threads (on CUDA: 4 GB), measured between the engines in every round.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from minigpt import GPT2, Failure, GPT2Config, LanguageModel, SamplingParams, __version__, load, save, usable_cpus

SIZES = {"124M": (12, 12, 768), "355M": (24, 16, 1024), "774M": (36, 20, 1280), "1558M": (48, 25, 1600)}  # L, H, E
NEW = 32  # steps of a measurement of decoding
# Prompt length and batch size of each work. "prefill" is the time to the first token.
WORKS = {
    "prefill 512": (512, 1),
    "decode, prompt 16": (16, 1),
    "decode, prompt 512": (512, 1),
    "decode, prompt 984": (984, 1),  # 1000 tokens in the middle of its steps
    "decode, batch 8": (16, 8),
    "decode, batch 32": (16, 32),
    "search, 4 beams": (16, 1),  # 64 tokens from the prompt on
    "look-up, a loop": (48, 1),  # the same, of a prompt that repeats itself, with guesses from what came before
}
BEAMS, WHOLLY = 4, 64
WAYS = ("search", "look-up")  # what an engine may lack
GROWTH = {f"decode, prompt {n}": (n, 1) for n in (16, 128, 256, 512, 768, 984)} | {
    f"decode, batch {n}": (16, n) for n in (2, 4, 8, 16, 32)
}

WHOLE = "--help, start to first token, peak memory"  # measured on whole processes, together


class Engine:
    """An engine with a model loaded. dtypes: those that it has on a CPU. batches: whether it takes several rows.
    ways: which of WAYS it has."""

    package = ""
    dtypes: tuple[str, ...] = ()
    batches = True
    ways: tuple[str, ...] = ()

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        """The `new` tokens that continue each prompt (all of them of the same length).

        Calls `drawn` whenever all rows have a token more.
        """
        raise NotImplementedError

    def search(self, prompt: list[int], new: int) -> list[int]:
        """The best continuation of `new` tokens that BEAMS beams find."""
        raise NotImplementedError

    def look_up(self, prompt: list[int], new: int) -> list[int]:
        """The `new` greedy tokens, guessed from the tokens so far and verified several at a time."""
        raise NotImplementedError


class Minigpt(Engine):
    package = "minigpt"
    ways = WAYS
    dtypes = ("float32", "float16", "int8")

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.lm = load(folder, dtype=dtype, device=device, draft="off")
        self.guessing = LanguageModel(self.lm.model)

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=new, stop_ids=())
        found: list[list[int]] = [[] for _ in prompts]
        for row, step in self.lm.stream_many(prompts, params, batch_size=len(prompts)):
            if isinstance(step, Failure):
                raise step.error
            found[row].append(step.id)
            if row == len(prompts) - 1:
                drawn()
        return found

    def search(self, prompt: list[int], new: int) -> list[int]:
        return self.lm.generate(prompt, num_beams=BEAMS, max_new_tokens=new, stop_ids=()).ids

    def look_up(self, prompt: list[int], new: int) -> list[int]:
        return self.guessing.generate(prompt, max_new_tokens=new, stop_ids=()).ids


class Transformers(Engine):
    package = "transformers"
    ways = WAYS
    dtypes = ("float32",)
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model, self.device = model.eval().to(device), device

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=self.device)
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

        class Streamer:
            """Is given the prompts, then the tokens of each step, once CUDA has them."""

            def put(self, tokens: torch.Tensor) -> None:
                if tokens.shape != ids.shape:
                    drawn()

            def end(self) -> None:
                pass

        settings |= {"streamer": Streamer(), "attention_mask": torch.ones_like(ids)}
        with torch.inference_mode():
            out = self.model.generate(ids, **settings, **self.settings)
        return out[:, ids.shape[1] :].tolist()

    def whole(self, prompt: list[int], new: int, **settings: Any) -> list[int]:
        ids = torch.tensor([prompt], device=self.device)
        settings |= {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        settings["attention_mask"] = torch.ones_like(ids)
        with torch.inference_mode():
            return self.model.generate(ids, **settings, **self.settings)[0, ids.shape[1] :].tolist()

    def search(self, prompt: list[int], new: int) -> list[int]:
        return self.whole(prompt, new, num_beams=BEAMS)

    def look_up(self, prompt: list[int], new: int) -> list[int]:
        return self.whole(prompt, new, prompt_lookup_num_tokens=10)


class TransformersCompiled(Transformers):
    """With a static cache, which makes `generate` compile the step: for CUDA."""

    settings: ClassVar[dict[str, Any]] = {"cache_implementation": "static"}

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        super().__init__(folder, work, dtype, device, threads)
        # Each work has a static cache of its own shape: after 8 of them torch would stop compiling.
        torch._dynamo.config.recompile_limit = 64


def made(path: Path, make: Callable[[Path], Any]) -> Path:
    """`path`, made if it is not there: whole or not at all, since what is there is used again."""
    if not path.exists():
        part = path.with_name("part-" + path.name)
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        make(part)
        part.rename(path)
    return path


class LlamaCpp(Engine):
    package = "llama-cpp-python"
    dtypes = ("float32", "float16", "int8")
    batches = False
    ways = ("look-up",)

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        import llama_cpp

        path = made(work / f"{dtype}.gguf", lambda part: write_gguf(folder, part, dtype))
        settings = {"n_threads": threads, "n_threads_batch": threads}
        if dtype == "float32":  # else the cache is float16, and half of it is read
            settings |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        self.open = partial(llama_cpp.Llama, str(path), n_ctx=1024, flash_attn=True, verbose=False, **settings)
        self.model, self.guessing = self.open(), None

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        return [self.drawn(self.model, prompts[0], new, drawn)]

    def look_up(self, prompt: list[int], new: int) -> list[int]:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.guessing = self.guessing or self.open(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10))
        return self.drawn(self.guessing, prompt, new, lambda: None)

    def drawn(self, model: Any, prompt: list[int], new: int, drawn: Callable[[], None]) -> list[int]:
        model.reset()
        ids: list[int] = []
        for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            drawn()
            ids.append(token)
            if len(ids) == new:
                break
        return ids


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """llama.cpp's format, without a vocabulary."""
    import gguf

    model = load(folder, device="cpu").model
    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.inner_dim)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}
    names |= {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    names |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "float16": kinds.F16, "int8": kinds.Q8_0}[dtype]
    for name, parameter in model.named_parameters():
        module, _, ending = name.rpartition(".")
        block, inner = "", module
        if module.startswith("h."):
            _, number, inner = module.split(".", 2)
            block = f"blk.{number}."
        data = parameter.detach().contiguous().numpy()
        if data.ndim == 2 and module != "wpe":
            writer.add_tensor(f"{block}{names[inner]}.{ending}", gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{block}{names[inner]}.{ending}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class CTranslate2(Engine):
    package = "ctranslate2"
    ways = ("search",)
    dtypes = ("float32", "int8")

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        import ctranslate2

        def convert(part: Path) -> None:
            source = with_plain_tokenizer(folder, work / "with-tokenizer")
            ctranslate2.converters.TransformersConverter(str(source)).convert(str(part), quantization=dtype)

        path = made(work / f"ctranslate2-{dtype}", convert)
        self.model = ctranslate2.Generator(str(path), compute_type=dtype, intra_threads=threads, inter_threads=1)

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        def callback(step: Any) -> bool:
            if step.batch_id == len(prompts) - 1:
                drawn()
            return False  # go on

        start = [[f"t{id}" for id in ids] for ids in prompts]
        settings = {"max_length": new, "min_length": new, "include_prompt_in_result": False, "sampling_topk": 1}
        return [done.sequences_ids[0] for done in self.model.generate_batch(start, callback=callback, **settings)]

    def search(self, prompt: list[int], new: int) -> list[int]:
        settings = {"max_length": new, "min_length": new, "include_prompt_in_result": False, "beam_size": BEAMS}
        return self.model.generate_batch([[f"t{id}" for id in prompt]], **settings)[0].sequences_ids[0]


def with_plain_tokenizer(folder: Path, copy: Path) -> Path:
    """The model beside a tokenizer with the tokens t0, t1, ...: the converter wants one, the measurement does not."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    copy.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            (copy / path.name).unlink(missing_ok=True)
            (copy / path.name).symlink_to(path.resolve())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"t{id}": id for id in range(size)}, unk_token="t0"))
    last = f"t{size - 1}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", bos_token=last, eos_token=last)
    fast.save_pretrained(copy)
    return copy


class OpenVINO(Engine):
    """int8 and int8-bfloat16 have int8 weights, and as OpenVINO sets it an int8 cache and products in int8; what lies
    between them is in float32 and in bfloat16."""

    package = "openvino"
    dtypes = ("float32", "int8", "int8-bfloat16")

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        import openvino

        def export(part: Path) -> None:
            from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

            quantization = OVWeightQuantizationConfig(bits=8) if dtype.startswith("int8") else None
            options = {"export": True, "compile": False, "quantization_config": quantization, "load_in_8bit": False}
            OVModelForCausalLM.from_pretrained(str(folder), **options).save_pretrained(part)

        path = made(work / f"openvino-{dtype.split('-')[0]}", export)
        precision = "bf16" if dtype.endswith("bfloat16") else "f32"
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if dtype == "float32":
            settings["KV_CACHE_PRECISION"] = "f32"  # else it is float16, and half the cache is read
        model = openvino.Core().compile_model(path / "openvino_model.xml", "CPU", settings)
        self.names = {name for port in model.inputs for name in port.get_names()}
        self.request = model.create_infer_request()

    def generate(self, prompts: list[list[int]], new: int, drawn: Callable[[], None]) -> list[list[int]]:
        import numpy as np

        self.request.reset_state()
        ids, past, done = np.array(prompts), 0, []
        rows = np.arange(len(prompts), dtype=np.int32)
        for _ in range(new):
            length = past + ids.shape[1]
            inputs = {
                "input_ids": ids,
                "attention_mask": np.ones((len(prompts), length), dtype=np.int64),
                "position_ids": np.tile(np.arange(past, length), (len(prompts), 1)),
                "beam_idx": rows,
            }
            self.request.infer({name: value for name, value in inputs.items() if name in self.names}, share_inputs=True)
            ids, past = self.request.get_tensor("logits").data[:, -1].argmax(-1)[:, None], length
            drawn()
            done.append(ids)
        return np.concatenate(done, 1).tolist()


class Memory(Engine):
    """Not an engine, but the machine: the bytes per second of reading memory."""

    package = "torch"

    def __init__(self, folder: Path, work: Path, dtype: str, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.numbers = torch.rand((2**27 if device == "cpu" else 2**30), device=device)

    def bandwidth(self) -> float:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            float(self.numbers.sum())
            seconds.append(time.perf_counter() - started)
        return self.numbers.numel() * 4 / statistics.median(seconds)


CPU_ENGINES = {
    "minigpt": Minigpt,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "ctranslate2": CTranslate2,
    "openvino": OpenVINO,
}
CUDA_ENGINES = {"minigpt": Minigpt, "transformers": Transformers, "transformers, compiled": TransformersCompiled}


def serve(pipe: Connection, engine: type[Engine], arguments: tuple[Any, ...]) -> None:
    """The engine's process: load, then measure what is asked for until there is no more."""
    try:
        loaded = engine(*arguments)
    except Exception as error:  # whatever an engine has against this machine, the others can be measured
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        return
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        if isinstance(loaded, Memory):
            pipe.send(loaded.bandwidth())
            continue
        length, batch, new, vocabulary, way = task
        apart = 8 if way == "look-up" else length  # places from a token to where it comes again
        prompts = [[(7 * row + 31 * (at % apart)) % vocabulary for at in range(length)] for row in range(batch)]
        try:
            times = [time.perf_counter()]
            if way:
                done = [(loaded.search if way == "search" else loaded.look_up)(prompts[0], new)]
                times.append(time.perf_counter())
            else:
                done = loaded.generate(prompts, new, lambda times=times: times.append(time.perf_counter()))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        counts = [len(ids) for ids in done]
        seconds = [after - before for before, after in itertools.pairwise(times)]
        whole = counts == [new] * batch and len(seconds) == (1 if way else new)
        pipe.send(seconds if whole else f"gave {counts} tokens in {len(seconds)} steps instead of {new} each")


class Process:
    """An engine in a process of its own."""

    def __init__(self, name: str, dtype: str, engine: type[Engine], arguments: tuple[Any, ...]) -> None:
        self.name, self.dtype, self.engine = name, dtype, engine
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, engine, arguments), daemon=True)
        self.process.start()
        other.close()

    def answer(self) -> Any:
        """What it sends next. Raises RuntimeError if it ends instead: killed for memory, say."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with exit code {self.process.exitcode}") from None

    def measure(self, *task: int | str) -> Any:
        """The seconds of each step; of the memory, bytes per second. Raises RuntimeError where it cannot."""
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self.pipe.send(task)
        found = self.answer()
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


def start(args: argparse.Namespace, folder: Path, work: Path) -> list[Process]:
    """The engines that work here, in each of the wanted dtypes that they have, ready to measure."""
    running = []
    for name in args.engines:
        engine = (CPU_ENGINES if args.device == "cpu" else CUDA_ENGINES)[name]
        if engine is not Minigpt and version(engine.package) is None:
            print(f"{name}: {engine.package} is not installed", file=sys.stderr)
            continue
        for dtype in engine.dtypes if args.device == "cpu" else args.dtypes:
            if dtype.split("-")[0] not in args.dtypes:
                continue
            process = Process(name, dtype, engine, (folder, work, dtype, args.device, args.threads))
            try:
                problem = process.answer()
            except RuntimeError as error:
                problem = str(error)
            print(f"{name} {dtype}: {problem or 'ready'}", file=sys.stderr)
            if problem is None:
                running.append(process)
    return running


def version(package: str) -> str | None:
    if package == "minigpt":  # which may be a checkout, not installed
        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(
    args: argparse.Namespace, running: list[Process], works: dict[str, tuple[int, int]], config: GPT2Config
) -> Any:
    """{work: {"engine dtype": [seconds of each round]}}, and the bandwidths."""
    memory = Process("memory", "", Memory, (None, None, "", args.device, args.threads))
    memory.pipe.recv()
    results: dict[str, dict[str, list[float]]] = {work: {} for work in works}
    bandwidths = []
    vocabulary, positions = config.vocab_size, config.n_positions
    for number in range(args.rounds + 1):  # the first one warms up
        print(f"round {number} of {args.rounds}", file=sys.stderr)
        for work, (length, batch) in works.items():
            new = min(NEW, positions - length)
            if new < 1:
                continue
            bandwidth = memory.measure()
            if number:
                bandwidths.append(bandwidth)
            first = number % max(len(running), 1)  # each round begins with another engine
            for engine in running[first:] + running[:first]:
                way = next((way for way in WAYS if work.startswith(way)), "")
                if (batch > 1 and not engine.engine.batches) or (way and way not in engine.engine.ways):
                    continue
                if work not in WORKS and engine.dtype != "float32":  # for the picture, which shows float32
                    continue
                try:
                    if args.device == "cuda":  # caches and graphs are made anew for each shape: not to be timed
                        engine.measure(length, batch, new + 1, vocabulary, way)
                    if work.startswith("decode"):
                        seconds = statistics.median(engine.measure(length, batch, new + 1, vocabulary, way)[1:])
                    else:
                        new = min(WHOLLY, positions - length - 10) if way else 1  # with room for guesses
                        seconds = engine.measure(length, batch, new, vocabulary, way)[0]
                except RuntimeError as error:
                    print(f"{engine.name} {engine.dtype}: left out from {work} on: {error}", file=sys.stderr)
                    engine.process.terminate()
                    running.remove(engine)
                    continue
                if number:
                    results[work].setdefault(f"{engine.name} {engine.dtype}", []).append(seconds)
    memory.process.terminate()
    return results, bandwidths


def whole_processes(args: argparse.Namespace, folder: Path, config: GPT2Config) -> dict[str, dict[str, list[float]]]:
    """Seconds from start to first token, and the peak memory (MB) of a run over the full context."""
    theirs = (
        "import sys, torch, transformers; torch.set_num_threads({threads});"
        "model = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1], dtype=torch.float32).eval();"
        "ids = torch.arange({length})[None];"
        "print(model.generate(ids, max_new_tokens={new}, min_new_tokens={new}, do_sample=False, pad_token_id=0)[0, -1])"
    )
    ours = [
        sys.executable,
        "-m",
        "minigpt",
        "generate",
        "-m",
        str(folder),
        "--ignore-eos",
        "--threads",
        str(args.threads),
    ]
    results: dict[str, dict[str, list[float]]] = {}
    half = config.n_positions // 2
    works = (("--help", 0, 0, args.rounds), ("start to first token", 8, 1, args.rounds), ("peak memory", half, half, 1))
    for work, length, new, rounds in works:
        results[work] = {}
        for number in range(1 if work == "peak memory" else 0, rounds + 1):  # number 0 warms the disk cache up
            for name in args.engines:
                if work == "--help":
                    if name != "minigpt":
                        continue
                    command = [*ours[:4], "--help"]
                elif name == "minigpt":
                    ids = " ".join(map(str, range(length)))
                    command = [*ours, "--ids", ids, "-n", str(new), "--json"]
                elif name == "transformers" and version("transformers"):
                    code = theirs.format(threads=args.threads, length=length, new=new)
                    command = [sys.executable, "-c", code, str(folder)]
                else:
                    continue
                started = time.perf_counter()
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                _, status, usage = os.wait4(process.pid, 0)
                seconds = time.perf_counter() - started
                if status:
                    print(f"{name}: left out from {work}: exit status {status}: {' '.join(command)}", file=sys.stderr)
                    continue
                peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
                if number:
                    results[work].setdefault(f"{name} float32", []).append(peak if work == "peak memory" else seconds)
        print(work, file=sys.stderr)
    return results


def model_folder(args: argparse.Namespace) -> Path:
    """The folder to measure: the one given, or random weights of the named size."""
    if args.model:
        return args.model.resolve()
    folder: Path = args.work / args.size
    if not (folder / "config.json").exists():
        print(f"writing random weights of {args.size}", file=sys.stderr)
        torch.manual_seed(0)
        layers, heads, width = SIZES[args.size]
        save(GPT2(GPT2Config(n_layer=layers, n_head=heads, n_embd=width)), folder)
    return folder


def fingerprint(folder: Path) -> str:
    """Which model it is: folders may share a name, and a folder may be written again."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    what = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8]


def limit(config: GPT2Config, parameters: int, length: int, batch: int, bandwidth: float) -> float:
    """The least seconds that a float32 step can take: the weights and the cache (without the new tokens) read once."""
    cache = 2 * config.n_layer * config.n_embd * batch * (length + NEW // 2)
    return 4 * (parameters - config.n_positions * config.n_embd + cache) / bandwidth


def table(works: dict[str, tuple[int, int]], results: Any, least: dict[str, float]) -> str:
    """Markdown: for each work and engine the median, and how many times as long it takes as minigpt in that dtype."""
    lines = ["| work | engine | | minigpt is faster by |", "|---|---|---|---|"]
    for work, engines in results.items():
        medians = {engine: statistics.median(values) for engine, values in engines.items()}
        for engine, median in medians.items():
            name, dtype = engine.rsplit(" ", 1)
            own = medians.get(f"minigpt {dtype.split('-')[0]}")
            ratio = f"{median / own:.2f} x" if own and name != "minigpt" else ""
            if work == "peak memory":
                shown = f"{median:.0f} MB"
            elif work.startswith("decode"):
                shown = f"{works[work][1] / median:.1f} tokens/s, {median * 1000:.2f} ms a step"
            else:
                shown = f"{median * 1000:.0f} ms"
            if dtype == "float32" and work in least:
                shown += f", {least[work] / median:.0%} of the memory limit"
            lines.append(f"| {work} | {engine} | {shown} | {ratio} |")
    short, long = (results.get(f"decode, prompt {length}", {}) for length in (16, 984))
    for engine in (engine for engine in short if engine in long and engine.endswith(" float32")):
        growth = statistics.median(long[engine]) / statistics.median(short[engine])
        lines.append(f"| a step at 1000 tokens | {engine} | {growth:.2f} x its step at 32 | |")
    return "\n".join(lines)


def draw(path: Path, results: Any, what: str) -> None:
    """The growth of a step with the context, and of the throughput with the batch, in float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for engine in sorted({engine for engines in results.values() for engine in engines if engine.endswith(" float32")}):
        points = [
            (*GROWTH[work], statistics.median(engines[engine]))
            for work, engines in results.items()
            if work in GROWTH and engine in engines
        ]
        contexts = [(length, seconds * 1000) for length, batch, seconds in points if batch == 1]
        batches = [(batch, batch / seconds) for length, batch, seconds in points if length == 16]
        for axes, line in ((left, contexts), (right, batches)):
            axes.plot(*zip(*sorted(line), strict=True), marker="o", label=engine.removesuffix(" float32"))
    left.set(xlabel="tokens in the context", ylabel="ms per token, batch 1", ylim=(0, None))
    right.set(xlabel="rows in the batch", ylabel="tokens per second, 16-token prompts", ylim=(0, None))
    left.legend()
    figure.suptitle(what, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, help="a folder in the official layout")
    what.add_argument("--size", choices=SIZES, default="124M", help="random weights of this size [124M]")
    parser.add_argument("--engines", type=lambda text: text.split(","), help="such as minigpt,transformers [all]")
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), help="[CPU: all; CUDA: float32,float16,bfloat16]"
    )
    parser.add_argument("--works", default="", help="only works whose names contain this, such as decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--picture", type=Path, help="draw the growth with context and batch (takes as long again)")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "minigpt-bench", help="[%(default)s]")
    args = parser.parse_args()
    known = CPU_ENGINES if args.device == "cpu" else CUDA_ENGINES
    args.engines = args.engines or list(known)
    args.dtypes = args.dtypes or (
        ["float32", "float16", "int8"] if args.device == "cpu" else ["float32", "float16", "bfloat16"]
    )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    if unknown := set(args.engines) - set(known):
        parser.error(f"unknown engine {unknown.pop()!r}: use {', '.join(known)}")

    if unknown := set(args.dtypes) - {"float32", "float16", "int8" if args.device == "cpu" else "bfloat16"}:
        parser.error(f"unknown dtype {unknown.pop()!r} on {args.device}")
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    if not any(args.works in name for name in (*WORKS, *GROWTH, WHOLE)):
        parser.error(f"no work has {args.works!r} in its name: use {', '.join((*WORKS, WHOLE))}")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"{args.model} holds no config.json: give a folder with a model in the official layout")

    args.work.mkdir(parents=True, exist_ok=True)
    folder = model_folder(args)
    config = GPT2Config.from_dict(json.loads((folder / "config.json").read_text()))
    parameters = sum(parameter.numel() for parameter in load(folder, device="cpu").model.parameters())
    own = args.work / f"{folder.name}-{fingerprint(folder)}"
    own.mkdir(parents=True, exist_ok=True)
    works = {name: work for name, work in {**WORKS, **(GROWTH if args.picture else {})}.items() if args.works in name}
    works = {name: work for name, work in works.items() if work[0] < config.n_positions}

    running = start(args, folder, own)
    results, bandwidths = measure(args, running, works, config) if works else ({}, [])
    for process in running:
        process.process.terminate()
    if args.device == "cpu" and args.works in WHOLE:
        results |= whole_processes(args, folder, config)

    bandwidth = statistics.median(bandwidths) if bandwidths else None
    least = {
        name: limit(config, parameters, *work, bandwidth) for name, work in works.items() if name.startswith("decode")
    }
    device = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    machine = {
        "date": str(datetime.date.today()),
        "model": folder.name,
        "device": device,
        "threads": args.threads,
        "bandwidth": bandwidth,
        "versions": {
            package: version(package) for package in ("torch", *(known[name].package for name in args.engines))
        },
    }
    speed = f", memory read at {bandwidth / 1e9:.1f} GB/s" if bandwidth else ""
    title = f"{folder.name}, {device}, {args.threads} threads{speed}, {machine['date']}"
    print(f"{title}; {', '.join(f'{name} {number}' for name, number in machine['versions'].items() if number)}\n")
    print(table(works, results, least))
    if args.json:
        args.json.write_text(json.dumps({**machine, "seconds": results, "limits": least}, indent=1) + "\n")
    if args.picture:
        draw(args.picture, results, title)


if __name__ == "__main__":
    main()
