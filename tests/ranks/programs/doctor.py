"""Run `hpcai doctor --ranks` with a fault on one rank: doctor.py FAULT RANK ARGS..."""

import ctypes
import os
import sys
import time

from hpcai import cli
from hpcai.cli.doctor import job, rank_report

fault, rank, *args = sys.argv[1:]
if os.environ["RANK"] == rank:
    if fault == "other":
        rank_report.platform.python_version = lambda: "3.9.0"
    elif fault == "hang":
        job.network.measure_pace = lambda device: ctypes.PyDLL(None).sleep(8)  # holds the GIL
if fault == "hang" and os.environ["RANK"] == "2":
    job.network.measure_pace = lambda device: time.sleep(60)
sys.exit(cli.main(["doctor", "--ranks", *args]))
