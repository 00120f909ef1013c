"""The command `hexi`: argument parsing only; `report` makes the text, tables and pages that it prints."""
