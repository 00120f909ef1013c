"""The command `hexi`: thin. What it prints is made in `report`."""
