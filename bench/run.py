"""Runs every bench program, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pariskv_core as pk

for program in sorted(Path(__file__).resolve().parent.glob("bench_*.py")):
    if program.stem == "bench_cuda" and not pk.is_available("cuda"):
        print("There is no GPU that pariskv_core can use here: bench_cuda.py is left out.")
        continue
    subprocess.run([sys.executable, program], check=True)
