"""Installs the pinned torch: where no GPU is, the build without CUDA.

    python packaging/fetch_torch.py [--cpu]

On x86-64 the torch of PyPI brings CUDA along, 5 GB on the disk. The build without it, 0.8 GB, is on
PyTorch's own index. Where that cannot be reached, PyPI's is taken, and that is said.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import progress

# Its 2.13.0+cpu is newer than a plain 2.13.0 to pip, so it is taken where both are found.
INDEX = "https://download.pytorch.org/whl/cpu"
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def command(cpu: bool) -> list[str]:
    """pip's. Without dependencies, so that the index is asked for torch alone."""
    pip = [sys.executable, "-m", "pip", "install", "--progress-bar", "raw", "--no-deps"]
    other = ["--extra-index-url", INDEX, "--retries", "1"] if cpu else []
    return [*pip, *other, "-c", str(CONSTRAINTS), "torch"]


def with_cuda() -> bool:
    needs = importlib.metadata.requires("torch") or []
    return any(each.startswith(("nvidia", "cuda")) and "extra ==" not in each for each in needs)


def main() -> None:
    cpu = sys.argv[1:] == ["--cpu"]
    which = "the build without CUDA: 0.2 GB" if cpu else "with CUDA: 5 GB on the disk"
    code = progress.run(f"Fetching torch ({which})", command(cpu))
    if code == 0 and cpu and with_cuda():
        print(
            f"Note: no torch without CUDA was found ({INDEX}), so it is PyPI's: what it needs of "
            "CUDA comes next, 5 GB on the disk in all"
        )
    sys.exit(code)


if __name__ == "__main__":
    main()
