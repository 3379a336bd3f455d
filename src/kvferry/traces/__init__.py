"""Traces: what requests asked for and when, without their tokens. Read, checked, written."""

from kvferry.traces.lines import MOONCAKE_BLOCK_TOKENS, BadLineError, TraceFormat
from kvferry.traces.reading import TraceReader
from kvferry.traces.request import TraceRequest, keys_of_numbers

__all__ = [
    "MOONCAKE_BLOCK_TOKENS",
    "BadLineError",
    "TraceFormat",
    "TraceReader",
    "TraceRequest",
    "keys_of_numbers",
]
