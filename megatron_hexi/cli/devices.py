"""``hexi catalog``: the GPUs that are known."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_hexi.cli.output import AsJson, Picture, check_outputs, print_json, print_report, write_picture
from megatron_hexi.cluster import catalog as known_devices
from megatron_hexi.cluster import device as known_device
from megatron_hexi.report.tables import catalog_table, device_dict, device_report

app = typer.Typer()


@app.command(epilog="Example: hexi catalog H100-SXM-80GB --picture h100.png")
def catalog(
    gpu: Annotated[str | None, typer.Argument(metavar="[GPU]", help="Show this GPU's curves.")] = None,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Show known GPUs: memory, links, rates and their sources."""
    check_outputs([], [], picture)
    devices = list(known_devices().values()) if gpu is None else [known_device(gpu)]
    if picture is not None:
        from megatron_hexi.report.pictures import draw_curves

        write_picture(draw_curves(devices), picture)
    if as_json:
        print_json({"devices": [device_dict(device) for device in devices]})
    else:
        print_report(catalog_table(devices) if gpu is None else device_report(devices[0]))
