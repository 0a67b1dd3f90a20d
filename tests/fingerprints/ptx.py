"""PTX of the kernels of the compile tests, with everything taken out that depends on names or lines of the sources."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from . import hooks

# Which cases are compiled: by level, the quick or all compile tests of these compute capabilities.
LEVELS = {
    "quick": ((90, True), (80, True)),
    "usual": ((90, False), (80, True)),
    "every": ((90, False), (80, False), (89, False)),
}


class Compiled(Exception):
    """Raised once a kernel's PTX is known: nobody here wants it assembled."""


def jobs(level: str) -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """A job for each case of the compile tests."""
    prepare()
    for capability, quick in LEVELS[level]:
        for name, compile_all in hooks.compile_cases(capability, quick):
            yield f"{capability}/{name}", lambda c=capability, n=name, f=compile_all: _texts(f"ptx/{c}/{n}", f)


def _texts(name: str, compile_all: Callable[[], None]) -> dict[str, str]:
    """The normalised PTX of each kernel that ``compile_all`` compiles, in order, each once."""
    import triton

    real, seen, found = triton.compile, set(), []

    def compile(src: Any, target: Any = None, options: dict[str, Any] | None = None) -> Any:
        key = (src.hash(), str(sorted((options or {}).items())))
        if key not in seen:
            seen.add(key)
            found.append(text_of(real(src, target=target, options=options)))
        raise Compiled

    with mock.patch.object(triton, "compile", compile), without_assembler():
        compile_all()
    assert found, f"{name} compiled no kernel"
    return {f"{name}/{k}": text for k, text in enumerate(found)}


def prepare() -> None:
    """Let Triton compute the hash of its own files, which takes seconds, before processes are forked."""
    from triton.runtime.cache import triton_key

    triton_key()


def without_assembler() -> Any:
    """Kernels are compiled as far as PTX."""
    from triton.backends.nvidia.compiler import CUDABackend

    return mock.patch.object(CUDABackend, "make_cubin", lambda self, *given: b"")


def text_of(compiled: Any) -> str:
    """A compiled kernel's resources that PTX does not tell, and its PTX."""
    metadata = compiled.metadata
    facts = {k: getattr(metadata, k, None) for k in ("shared", "num_warps", "num_ctas", "cluster_dims", "maxnreg")}
    return f"// {facts}\n{normalise(compiled.asm['ptx'])}"


def normalise(ptx: str) -> str:
    """PTX without names, comments and debug information; labels are counted in the order of their first appearance."""
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", "", ptx, flags=re.DOTALL | re.MULTILINE)
    lines = []
    for line in ptx.splitlines():
        line = re.sub(r"\s+", " ", line).strip()
        if line and not re.match(r"\.(loc|file|section)\b|\$L__(tmp|func_begin|func_end)\w*:", line):
            lines.append(line)
    ptx = "\n".join(lines) + "\n"
    declared = re.findall(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([A-Za-z_$][\w$.]*)", ptx)
    for k, name in enumerate(dict.fromkeys(declared)):
        ptx = re.sub(rf"(?<![\w$.]){re.escape(name)}(?=_param_|_\$|[^\w$]|$)", f"kernel{k}", ptx)
    labels: dict[str, str] = {}
    return re.sub(r"\$L_\w+", lambda m: labels.setdefault(m[0], f"$label{len(labels)}"), ptx)
