"""What tests of several folders share: cases, dense references, comparisons, and programs run as subprocesses."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
