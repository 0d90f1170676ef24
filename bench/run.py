"""Runs every bench program, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

for program in sorted(Path(__file__).resolve().parent.glob("bench_*.py")):
    subprocess.run([sys.executable, program], check=True)
