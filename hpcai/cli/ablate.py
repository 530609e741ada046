"""`hpcai ablate APP`: measure the gain of each optimisation of an app on this machine.

The switches are added one by one, then each is left out alone. Every repeat measures all arrangements and starts with another one,
so that a busy machine slows all of them equally. The first run of each is a warmup. Factors are medians of the ratios within a
repeat, relative to none and to all switches, with 95 % intervals (bootstrap). Differences of loss and gradient (L2) are relative to
the plain implementation at the same weights and batch. Arrangements stay in memory if half of it remains free, or are rebuilt in
every repeat.
"""

import json
from collections.abc import Sequence
from typing import Any

from hpcai.cli import make_parser, tables
from hpcai.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    parser = make_parser("ablate", __doc__)
    args = parser.parse_intermixed_args(argv)
    if args.repeats < 1 or args.steps == 0:
        parser.error("--repeats and --steps are at least 1")

    import torch
    from rich.console import Console

    from hpcai import dist
    from hpcai.cli.ablation import Ablation, select_switches
    from hpcai.cli.bench.timing import machine_info
    from hpcai.cli.benchmarks import find_workload

    workload = find_workload(args.app)
    files = [arg for arg in args.overrides if arg.endswith((".yaml", ".yml"))][:1]
    cfg = workload.load([arg for arg in args.overrides if arg not in files], files[0] if files else None)
    with dist.start(cfg.mesh) as mesh:
        if mesh.sizes["evaluate"]:
            raise ConfigError(f"mesh.evaluate is {mesh.sizes['evaluate']}, but here all processes train; set it to 0")
        names = select_switches(switches := workload.all_switches(cfg, mesh), args.only)
        steps = args.steps or (8 if mesh.device.type == "cuda" else 4)
        result: dict[str, Any] = {"ablate": args.app, **machine_info(), "steps": steps, "repeats": args.repeats}
        result |= {"threads": torch.get_num_threads(), "processes": mesh.world}
        result["switches"] = [{**vars(switch), "on": switch.name in names} for switch in switches]
        with Console(stderr=True, quiet=not mesh.is_first).status("") as status:
            ablation = Ablation(lambda enabled: workload.training(cfg, mesh, enabled), names, mesh, steps)
            ablation.run(args.repeats, status.update)
            result |= {**ablation.rows(), "kept": ablation.keep_in_memory}
        result |= {"load_after": machine_info()["load"], "settings": cfg.model_dump(mode="json")}
    if mesh.is_first:
        print(json.dumps(result, allow_nan=False)) if args.json else print_tables(result)
    return 0


def print_tables(result: dict[str, Any]) -> None:
    title = "{ablate} on {device}, torch {torch}, {threads} threads, {processes} processes, load {load} to {load_after}; "
    print(title.format(**result) + "{repeats} repeats of {steps} steps".format(**result))
    for switch in result["switches"]:
        reason = f"; NOT AVAILABLE: {switch['why_not']}" if switch["why_not"] else "" if switch["on"] else "; not selected"
        print(f"  {switch['name']}: {switch['what']}{reason}")
    on_gpu = any(row.get("peak_bytes") is not None for row in result["cumulative"])
    rows: list[list[str]] = []
    for sign, kind in (("+", "cumulative"), ("-", "left_out")):
        for row in result[kind]:
            name = row["name"] if row["name"] == "plain" else f"{sign} {row['name']}"
            if row["error"]:
                rows.append([name, "failed"])
                print(f"{name} failed: {row['error']}")
                continue
            cells = [f"{row['peak_bytes'] / 1e6:,.0f}"] if on_gpu else []
            differences = ["" if (value := row[f"{key}_difference"]) is None else f"{value:.0e}" for key in ("loss", "gradient")]
            factor = "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["factor"]) if row["factor"] else ""
            values = f"{row['seconds']:.4g}", factor, *cells, f"{row['samples_per_second']:.4g}"
            rows.append([name, *values, *differences])
    heads = "", "s a step", "times", *(["peak MB"] if on_gpu else []), "samples/s", "loss", "gradient"
    print(*tables.lines(rows, heads), sep="\n")
    print("+ added to those above, speedup over plain; - left out alone, slowdown relative to all")
