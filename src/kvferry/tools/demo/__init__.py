"""A small serving engine on the CPU, and the runs that ``kvferry demo`` compares.

It owns the model, the device blocks, the workload, the demo's servers and the report. It leaves
KV offloading to kvferry and the terminal to ``kvferry.tools.cli``.
"""
