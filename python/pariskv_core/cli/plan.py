"""What a model's cache takes at some length, and whether it fits, before anything is loaded.

Exit code 1: it does not fit.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pariskv_core import _machine as machine
from pariskv_core._array import DeviceName
from pariskv_core.cli import parsing
from pariskv_core.cli.failures import DOES_NOT_HOLD, OK, CannotRunError
from pariskv_core.cli.screen import Screen
from pariskv_core.cli.text import count, seconds, size

if TYPE_CHECKING:
    from pariskv_core._shapes import ModelShape
    from pariskv_core.cli.served import Served
    from pariskv_core.cli.taken import Bytes

HELP = "what fits in memory, bytes per token, time per step, the largest context"


def arguments(parser: argparse.ArgumentParser) -> None:
    add, whole = parser.add_argument, parsing.whole
    add("model", nargs="?", help="a config.json, a model folder or a GGUF file")
    add("--layers", type=whole(1), help="instead of a model: its layers of full attention")
    add("--kv-heads", type=whole(1))
    add("--head-dim", type=whole(1))
    add("--query-heads", type=whole(1), help="(as many as kv heads)")
    add("--context", type=whole(1), help="tokens, like 131072 or 128K (the model's own)")
    add("--batch", type=whole(1, 1 << 16), default=1, help="sequences (1)")
    add("--device", choices=("cpu", "cuda"), help="(cuda where there is a GPU or --host-memory)")
    add("--memory", type=parsing.size, help="of the device, like 80GB (what is free here)")
    add("--host-memory", type=parsing.size, help="beside a GPU (what is available here)")
    add("--weights", type=parsing.size, help="of the model (the size of its files)")
    add("--top-k", type=parsing.top_k, default=100, help="rows fetched per kv head (100)")
    kept = "instead of a search: HardKV keeps so many rows per kv head and drops the others"
    add("--kept", type=whole(1, 1 << 17), help=kept)
    add("--kv-dtype", choices=("auto", "int8"), default="auto", help="of rows of the zone (auto)")
    add("--measure", action="store_true", help="time a step here instead of documented figures")
    add("--vllm", action="store_true", help="how many such sequences vLLM serves at once")
    share = "of --vllm, its --gpu-memory-utilization (0.92, its default)"
    add("--utilization", type=parsing.share, help=share)
    lanes = "of --vllm, requests at most (its default: by the memory of the GPU, 256 or 1024)"
    add("--max-num-seqs", type=whole(1), help=lanes)
    add("--threads", type=parsing.threads, default=machine.usable_cores(), help="for --measure")


def _shape(arguments: argparse.Namespace) -> ModelShape:
    from pariskv_core import _shapes as shapes

    numbers = (arguments.layers, arguments.kv_heads, arguments.head_dim)
    if arguments.model is not None:
        if any(numbers) or arguments.query_heads:
            raise CannotRunError("expected a model or a shape (--layers ...), got both")
        return shapes.read(arguments.model)
    if not all(numbers):
        raise CannotRunError("expected a model, or a shape: --layers, --kv-heads and --head-dim")
    heads = arguments.query_heads or arguments.kv_heads
    layers, kv_heads, head_dim = numbers
    return shapes.ModelShape("this shape", layers, heads, kv_heads, head_dim, head_dim)


def _device(arguments: argparse.Namespace, gpus: list[machine.Gpu]) -> DeviceName:
    own: DeviceName = "cuda" if gpus or arguments.host_memory is not None else "cpu"
    found: DeviceName = arguments.device or own
    if found == "cpu" and arguments.host_memory is not None:
        raise CannotRunError("--host-memory is memory beside a GPU; on the CPU say --memory")
    if found == "cuda" and not gpus and arguments.memory is None:
        raise CannotRunError("there is no GPU here to ask for its memory: say --memory, like 80GB")
    return found


def _steps(
    arguments: argparse.Namespace, shape: ModelShape, context: int, device: DeviceName
) -> dict[str, Any]:
    """Seconds of a model step: all engine layers, of ours and of torch, and where they are from."""
    from pariskv_core.cli import figures

    if arguments.kept:
        return {"ours": None, "dense": None, "source": "not known for kept rows"}
    if arguments.measure:
        from pariskv_core.cli import steps

        timed = steps.measure(
            steps.Case(
                tokens=context,
                batch=arguments.batch,
                query_heads=shape.query_heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                top_k=arguments.top_k,
                threads=arguments.threads,
                device=device,
            )
        )
        ours, dense, source = timed.ours, timed.dense, "measured here"
    else:
        table = figures.GPU if device == "cuda" else figures.CPU
        found = figures.step(
            table, context, arguments.batch, shape.kv_heads, max(shape.head_dim, shape.value_dim)
        )
        ours, dense = found.ours, found.dense
        source = f"documented for {table.where}, scaled by kv heads and their size"
    return {
        "ours": shape.layers * ours,
        "dense": shape.layers * dense if dense else None,
        "source": source,
    }


def _context(arguments: argparse.Namespace, shape: ModelShape) -> int:
    from pariskv_core.cli.taken import MOST_TOKENS

    context = int(arguments.context or shape.context)
    if not context:
        raise CannotRunError("the model does not say how long a text it was made for: --context")
    if context > MOST_TOKENS:
        raise CannotRunError(f"--context: expected at most {MOST_TOKENS:,}, got {context:,}")
    return context


def _room(arguments: argparse.Namespace, gpus: list[machine.Gpu] | None) -> machine.Room:
    """`gpus`: None on the CPU."""
    available = machine.available_memory()
    host = 0
    if gpus is not None:
        host = available if arguments.host_memory is None else arguments.host_memory
    if arguments.memory is not None:
        return machine.Room(arguments.memory, arguments.memory, host)
    if gpus is None:
        return machine.Room(available, available)
    gpu = max(gpus, key=lambda gpu: gpu.free)
    return machine.Room(gpu.total, gpu.free, host, gpu.name)


def _served(
    arguments: argparse.Namespace,
    shape: ModelShape,
    context: int,
    room: machine.Room,
    weights: int,
    *,
    gpu: bool,
) -> Served:
    from pariskv_core import ParisKV
    from pariskv_core.cli import served

    def count(sequences: int | None) -> Served:
        return served.count_requests(
            shape,
            room,
            weights,
            gpu=gpu,
            longest=context,
            settings={"policy": ParisKV(top_k=arguments.top_k), "kv_dtype": arguments.kv_dtype},
            utilization=arguments.utilization,
            sequences=sequences,
        )

    limit = arguments.max_num_seqs
    return served.advised(count) if limit is None and gpu else count(limit)


def _refuse(arguments: argparse.Namespace) -> None:
    """Options that do not go together."""
    if arguments.kept and arguments.measure:
        raise CannotRunError("--measure times a search; --kept keeps rows instead")
    if arguments.kept and arguments.vllm:
        raise CannotRunError("--vllm is planned for a search; --kept keeps rows instead")
    if arguments.kv_dtype != "auto" and (arguments.kept or arguments.measure):
        raise CannotRunError("--kv-dtype is planned for a search, and neither kept nor timed")
    for option in ("utilization", "max_num_seqs"):
        if getattr(arguments, option) is not None and not arguments.vllm:
            raise CannotRunError(
                f"--{option.replace('_', '-')} is vLLM's: expected --vllm beside it"
            )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    from pariskv_core import HardKV, ParisKV
    from pariskv_core.cli.taken import Taken, together

    _refuse(arguments)
    shape = _shape(arguments)
    gpus = machine.gpus()
    device = _device(arguments, gpus)
    gpu = device == "cuda"
    if arguments.utilization is not None and not gpu:
        raise CannotRunError("--utilization is of a GPU's memory, and this plan is for the CPU")
    context = _context(arguments, shape)
    room = _room(arguments, gpus if gpu else None)
    memory, host = room.free, room.host
    weights = arguments.weights if arguments.weights is not None else shape.weights

    policy = (
        HardKV(most=arguments.kept, placement="dropped")
        if arguments.kept
        else ParisKV(top_k=arguments.top_k)
    )
    config = shape.config(policy=policy, kv_dtype=arguments.kv_dtype, device=device)
    taken = Taken(shape, config, arguments.batch, memory - weights, host)
    parts = taken.parts(context)
    need = together(parts)
    fits = taken.fits(context)
    longest = taken.longest()
    token = taken.per_token()
    drops = bool(arguments.kept)
    found = {
        "model": vars(shape),
        "context": context,
        "batch": arguments.batch,
        "device": device,
        "weights": weights,
        "parts": {name: part._asdict() for name, part in parts.items()},
        "device_bytes": weights + need.device,
        "host_bytes": need.host,
        "device_memory": memory,
        "host_memory": host,
        "fits": fits,
        "largest_context": min(longest, shape.context or longest),
        "largest_context_by_memory": longest,
        "bytes_per_token": {
            "device": 0 if drops else token.summaries if gpu else token.summaries + token.rows,
            "host": int(token.rows) if gpu and not drops else 0,
        },
        "prompt_bytes_per_token": int(token.rows) if drops else None,
        "full_attention_bytes": int(arguments.batch * context * token.plain),
        "step_seconds": _steps(arguments, shape, context, device),
        "vllm_sequences": None,
        "vllm": None,
    }
    served = None
    if arguments.vllm:
        served = _served(arguments, shape, context, room, weights, gpu=gpu)
        found.update(vllm_sequences=served.sequences, vllm=served.record())
    _show(screen, found, shape, parts, arguments.model, served)
    screen.record(found)
    return OK if fits and found["vllm_sequences"] != 0 else DOES_NOT_HOLD


def _show(
    screen: Screen,
    found: dict[str, Any],
    shape: ModelShape,
    parts: dict[str, Bytes],
    model: str | None,
    served: Served | None,
) -> None:
    gpu, batch, context = found["device"] == "cuda", found["batch"], found["context"]
    kinds = {"sliding": shape.sliding_layers, "linear": shape.linear_layers}
    others = "".join(f" and {number} {kind}" for kind, number in kinds.items() if number)
    screen.say(
        f"{shape.name}: {count(shape.layers, 'layer')}{others}, {shape.query_heads} query heads, "
        f"{count(shape.kv_heads, 'kv head')} of {shape.head_dim}, 16 bits",
        style="bold",
    )
    screen.say(f"{count(batch, 'sequence')} of {context:,} tokens\n")
    weights = size(found["weights"]) if found["weights"] else "not counted"
    rows = [["weights", weights, ""]]
    for name, part in parts.items():
        if part.device or part.host:
            rows.append([name, size(part.device), size(part.host) if part.host else ""])
    rows.append(["together", size(found["device_bytes"]), size(found["host_bytes"])])
    rows.append(["there is", size(found["device_memory"]), size(found["host_memory"])])
    header = ["", "GPU" if gpu else "memory", "host memory"]
    width = 3 if gpu else 2
    screen.table([row[:width] for row in rows], header[:width], right=range(1, width))
    screen.say(
        "It fits." if found["fits"] else "It does not fit.", "green" if found["fits"] else "red"
    )
    longest, by_memory = found["largest_context"], found["largest_context_by_memory"]
    reason = " (the model's own; memory has room for more)" if longest < by_memory else ""
    screen.say(f"Largest context for this batch: {longest:,} tokens{reason}.")
    if 0 < shape.context < context:
        refused = "; vLLM refuses a longer --max-model-len by default" if served else ""
        said = f"The model was made for {shape.context:,} tokens, fewer than these{refused}."
        screen.say(said, "yellow")
    if served is not None:
        from pariskv_core.cli.served import sentences

        for sentence in sentences(served):
            screen.say(sentence)
    _show_growth(screen, found)
    if str(model).endswith(".gguf"):
        screen.say(
            "transformers unpacks the weights of a GGUF file to 2 or 4 bytes each.", "yellow"
        )
    if not found["weights"]:
        screen.say("No files of weights were found: say --weights to count them.", "yellow")


def _show_growth(screen: Screen, found: dict[str, Any]) -> None:
    full = f"full attention's cache would take {size(found['full_attention_bytes'])}."
    prompt = found["prompt_bytes_per_token"]
    if prompt is not None:
        screen.say(
            "A token of the answer takes nothing: rows that are not kept are dropped. Until the "
            f"first one, a token of the prompt takes {size(prompt)}; {full}"
        )
        return
    per = found["bytes_per_token"]
    beside = f" on the GPU and {size(per['host'])} there or in host memory" if per["host"] else ""
    screen.say(f"A token takes {size(per['device'])}{beside}; {full}")
    steps = found["step_seconds"]
    dense = f", torch's dense attention {seconds(steps['dense'])}" if steps["dense"] else ""
    screen.say(
        f"Attention of a step, all layers: {seconds(steps['ours'])}{dense} ({steps['source']}). "
        "The rest of the model comes on top."
    )
