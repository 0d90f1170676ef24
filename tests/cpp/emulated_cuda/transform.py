"""One CUDA source as C++ for the emulator: `transform.py SOURCE TARGET`.

What is CUDA's own syntax becomes calls of device.h and ptx.h: launches, variables in shared memory,
inline assembly. Everything else stays as it is, line by line, so that the compiler's messages and a
debugger name the source. An instruction that nobody emulates ends the build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# What each instruction is in ptx.h; None where there is nothing to do, since fibers of one thread
# see each other's writes in order.
INSTRUCTIONS = {
    "barrier.cluster.arrive.relaxed.aligned": "cluster_arrive",
    "barrier.cluster.arrive.release.aligned": "cluster_arrive",
    "barrier.cluster.wait.acquire.aligned": "cluster_wait",
    "cp.async.bulk.commit_group": "bulk_commit",
    "cp.async.bulk.global.shared::cta.bulk_group": "bulk_store",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint": "bulk_load",
    "cp.async.bulk.wait_group": "bulk_wait",
    "cp.async.bulk.wait_group.read": "bulk_wait",
    "cp.async.ca.shared.global": "stage",
    "cp.async.cg.shared.global": "stage",
    "cp.async.commit_group": "stage_commit",
    "cp.async.mbarrier.arrive.noinc.shared.b64": "stage_arrive",
    "cp.async.wait_group": "stage_wait",
    "createpolicy.fractional.L2::evict_first.b64": "cache_policy",
    "elect.sync": "elect",
    "ex2.approx.ftz.f32": "exp2",
    "fence.mbarrier_init.release.cluster": None,
    "fence.proxy.async.shared::cta": None,
    "fma.rn.sat.f32": "fma_saturated",
    "griddepcontrol.launch_dependents": None,  # flush() starts successors whenever it likes
    "griddepcontrol.wait": "grid_wait",
    "ld.acquire.gpu.global.u32": "load_told",
    "ld.relaxed.gpu.global.u64": "load_told",
    "ld.shared.u32": "load_shared",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "load_matrices<false>",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "load_matrices<true>",
    "lg2.approx.ftz.f32": "log2",
    "mapa.shared::cluster.u32": "map_address",
    "max.NaN.f32": "max_nan",
    "mbarrier.arrive.expect_tx.shared::cta.b64": "barrier_arrive_expect",
    "mbarrier.arrive.shared.b64": "barrier_arrive",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64": "barrier_expect",
    "mbarrier.init.shared.b64": "barrier_init",
    "mbarrier.test_wait.parity.shared.b64": "barrier_test",
    "mbarrier.try_wait.parity.shared::cta.b64": "barrier_test",
    "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc": "mma_bits",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "mma_bfloat16",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "mma_half",
    "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc": "mma_bits",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32": "mma_bytes",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": "mma_bfloat16",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32": "mma_half",
    "prefetch.global.L2": "prefetch",
    "prmt.b32": "permute_bytes",
    "rcp.approx.ftz.f32": "reciprocal",
    "rsqrt.approx.ftz.f32": "reciprocal_root",
    "selp.u32": "select",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32": "send",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32": "send",
    "st.relaxed.gpu.global.u64": "tell",
    "st.release.gpu.global.u32": "tell",
}

STRING = r'"(?:\\.|[^"\\])*"'


class UnknownInstructionError(Exception):
    pass


def characters(text: str, start: int = 0) -> Iterator[tuple[int, str, int]]:
    """Where, what and how deep in brackets: the characters outside of string literals."""
    depth = 0
    for found in re.finditer(rf"{STRING}|.", text[start:], re.S):
        depth += (found[0] in "([{") - (found[0] in ")]}")
        if not found[0].startswith('"'):
            yield start + found.start(), found[0], depth


def closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` is closed."""
    return next(at for at, _, depth in characters(text, opening) if depth == 0)


def split(text: str, separator: str) -> list[str]:
    cuts = [at for at, what, depth in characters(text) if what == separator and depth == 0]
    return [text[a:b] for a, b in zip([0] + [c + 1 for c in cuts], cuts + [len(text)], strict=True)]


def instruction(text: str, operands: list[str]) -> str:
    """One instruction as a statement."""
    register = re.match(r"\.reg\s+\.\w+\s+(\w+)$", text)
    if register:
        return f"uint64_t {register[1]} = 0; (void){register[1]};"
    opcode, _, rest = text.partition(" ")
    if opcode not in INSTRUCTIONS:
        raise UnknownInstructionError(opcode)
    function = INSTRUCTIONS[opcode]
    if function is None:
        return ""
    names = [name.strip() for name in re.sub(r"[{}\[\]]", " ", rest).split(",")]
    # A barrier's state, or `_` in its place, is a result nobody looks at, like who was elected.
    if function.startswith("barrier_arrive"):
        names = names[1:]
    names = [name.removeprefix("_|") for name in names]
    arguments = [re.sub(r"^%(\d+)$", lambda found: operands[int(found[1])], n) for n in names]
    return f"::emulator::ptx::{function}({', '.join(arguments)});"


def assembly(body: str) -> str:
    """What stands between the brackets of an asm, as a statement."""
    template = re.match(rf"\s*((?:{STRING}\s*)+)", body)
    assert template, body
    code = "".join(s[1:-1] for s in re.findall(STRING, template[1])).replace("\\n", " ").strip()
    # Outputs, inputs; what is clobbered does not matter.
    sections = split(body[template.end() :], ":")[1:3]
    operands = [
        f"({found[1]})"
        for section in sections
        for part in split(section, ",")
        if (found := re.match(rf"\s*{STRING}\s*\((.*)\)\s*$", part, re.S))
    ]
    code = re.sub(r"^\{(.*)\}$", r"\1", code)
    lines = [instruction(line.strip(), operands) for line in code.split(";") if line.strip()]
    return "do { " + " ".join(lines) + " } while (0)"


def replace_assembly(text: str, name: str) -> str:
    out, at = "", 0
    for found in re.finditer(r"\basm(?:\s+volatile)?\s*\(", text):
        end = closing(text, found.end() - 1) + 1
        try:
            code = assembly(text[found.end() : end - 1])
        except UnknownInstructionError as error:
            line = text.count("\n", 0, found.start()) + 1
            sys.exit(
                f"{name}:{line}: error: the emulator does not know the instruction {error}; "
                "it belongs into INSTRUCTIONS of transform.py and into ptx.h"
            )
        lines = text.count("\n", found.start(), end) - code.count("\n")
        out += text[at : found.start()] + code + "\n" * lines
        at = end
    return out + text[at:]


def replace_launches(text: str) -> str:
    """Kernel<<<grid, block, shared bytes, stream>>>(arguments)."""
    while found := re.search(r"([\w.:]+(?:<[\w:, ]*>)?)<<<", text):
        end = text.index(">>>", found.end())
        last = closing(text, end + 3) + 1
        name, arguments = found[1], text[end + 3 : last]
        launch = f"{{{text[found.end() : end]}}}, [&] {{ {name}{arguments}; }}"
        text = f'{text[: found.start()]}::emulator::launch("{name}", {launch}){text[last:]}'
    return text


def replace_shared(text: str) -> str:
    """Every block has its own; a variable is known by its place in the source."""
    attributes = r"(?:__align__\(\d+\)\s+)?"
    text = re.sub(
        rf"extern\s+__shared__\s+{attributes}([\w ]+?)\s+(\w+)\[\];",
        r"auto* \2 = reinterpret_cast<\1*>(::emulator::dynamic_shared());",
        text,
    )
    return re.sub(
        r"__shared__\s+([^;=]+?)\s+(\w+)((?:\[[^;]*?\])*);",
        r"static const char \2_key = 0; auto& \2 = ::emulator::static_shared<\1\3>(&\2_key);",
        text,
    )


def transform(text: str, name: str) -> str:
    # Such a parameter lies with the launch, which keeps a copy, and not with the thread.
    text = re.sub(r"const\s+__grid_constant__\s+(\w+)\s+(\w+)", r"const \1& \2", text)
    text = replace_shared(replace_launches(replace_assembly(text, name)))
    # The compiler need not warn of what nvcc looks after; in a source, -w says so.
    quiet = "#pragma GCC system_header\n" if name.endswith(".cuh") else ""
    return f'{quiet}#include "device.h"\n#line 1 "{name}"\n{text}'


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(transform(source.read_text(), str(source)))


if __name__ == "__main__":
    main()
