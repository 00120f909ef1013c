"""The record that a run writes for ``--hexi-record``, and that ``hexi report`` reads. No torch here."""

from megatron_hexi.record.model import (
    Interval,
    Leg,
    RankTimes,
    Record,
    Round,
    Start,
    append_to_record,
    open_record,
    read_record,
)

__all__ = [
    "Interval",
    "Leg",
    "RankTimes",
    "Record",
    "Round",
    "Start",
    "append_to_record",
    "open_record",
    "read_record",
]
