"""What a run writes down of itself for ``--hexi-record``, and ``hexi report`` reads. No torch here."""

from megatron_hexi.record.file import append_to_record, open_record, read_record
from megatron_hexi.record.model import Interval, Leg, RankTimes, Record, Round, Start

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
