"""The parts of ``bench/vllm_connectors.py``: one engine, its prompts, its loads, its tables."""
