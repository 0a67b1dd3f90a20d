"""Counts the instructions that a function takes per number, in kernels compiled for a GPU that need not be here.

``python -m tests.support.count_instructions cuda:90 [NAME ...]`` prints a row for each primitive with these names, else
for all that have an approximate form: of its exact form and of the approximate one, what the assembler writes (SASS; in
parentheses: of these, on the special function unit) and Triton's PTX. A kernel has one number a thread; what a copy of
numbers takes is subtracted. Run it in its own process: Triton decides at import whether it interprets.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from monoidreduce.engines.triton.launch import driver
from monoidreduce.program.primitives import PRIMITIVES
from tests.support import fast_functions

NUMBERS, WARPS = 128, 4  # of a kernel: one number a thread


def count(text: str, capability: int) -> tuple[int, int, int]:
    """Instructions of SASS, of these on the special function unit, and of PTX, of a kernel that writes ``text``."""
    source = fast_functions.write_kernel(text, NUMBERS)
    signature = {"out": "*fp32", "xs": "*fp32", "ys": "*fp32", "size": "i32"}
    function = driver.load_module(source).apply
    found = triton.compile(
        ASTSource(function, signature, {}, {}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS},
    )
    lines = [line.strip() for line in found.asm["ptx"].splitlines()]
    ptx = [line for line in lines if re.match(r"(@!?%p\d+ )?[a-z][\w.]*\s.*;", line) and not line.startswith(".")]
    sass = [name for name in _disassemble(found.asm["cubin"]) if name not in ("NOP", "BRA", "EXIT")]
    return len(sass), sass.count("MUFU"), len(ptx)


def _disassemble(cubin: bytes) -> list[str]:
    """The names of a kernel's instructions, by the tool in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", text)


def count_forms(name: str, capability: int) -> list[tuple[int, int, int]]:
    """The counts of a primitive's exact and of its fast form, beside those of a copy."""
    exact = fast_functions.write_exact(name)
    of_two = re.search(r"\by\b", exact) is not None
    copied = count("x + y" if of_two else "x", capability)
    made = (count(text, capability) for text in (exact, fast_functions.write_fast(exact, "native")))
    return [(sass - copied[0] + of_two, special, ptx - copied[2] + of_two) for sass, special, ptx in made]


def main(target: str, names: list[str]) -> None:
    print("| primitive | exact: SASS | PTX | fast: SASS | PTX |", "|---|---|---|---|---|", sep="\n")
    for name in names:
        forms = count_forms(name, int(target.removeprefix("cuda:")))
        cells = [f"{sass} ({special}) | {ptx}" for sass, special, ptx in forms]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    target, *wanted = sys.argv[1:] or [""]
    known = [n for n, p in PRIMITIVES.items() if p.triton and "{2}" not in p.triton]
    if not re.fullmatch(r"cuda:\d+", target) or not set(wanted) <= set(known):
        sys.exit(
            f"python -m tests.support.count_instructions cuda:90 [NAME ...], of the primitives:\n{' '.join(known)}"
        )
    fast = [n for n in known if PRIMITIVES[n].fast and n not in fast_functions.UNMEASURED]
    main(target, wanted or fast)
