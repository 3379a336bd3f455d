"""The parts of ``bench/vllm_connectors.py``: one engine, its prompts, its loads, its tables."""

from connectors import model_time as model_time  # the clock, before kvferry takes the real one
