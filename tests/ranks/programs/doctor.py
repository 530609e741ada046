"""`hpcai doctor --ranks`, of which one rank is another than it should be: FAULT RANK WORDS..."""

import ctypes
import os
import sys
import time
from dataclasses import replace

from hpcai import cli
from hpcai.cli.doctor import job, member, network

fault, rank, *words = sys.argv[1:]
if os.environ["RANK"] == rank:
    if fault == "other":
        member.platform.python_version = lambda: "3.9.0"
        skew = network.skew
        job.network.skew = lambda wire, rank, ranks: skew(wire, rank, ranks, clock=lambda: time.time() + 90)
    elif fault == "hang":
        job.network.pace = lambda device: ctypes.PyDLL(None).sleep(11)  # and no other thread runs meanwhile
if fault == "hang" and os.environ["RANK"] == "2":
    job.network.pace = lambda device: time.sleep(60)
if fault == "other":
    job.look = lambda *words: replace(member.look(*words), machine=os.environ["RANK"])  # each rank is a computer of its own
sys.exit(cli.main(["doctor", "--ranks", *words]))
