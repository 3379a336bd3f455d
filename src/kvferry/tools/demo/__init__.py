"""A small serving engine on the CPU, and the runs that ``kvferry demo`` compares.

Owns the model, the device blocks, the workload, the demo's servers and the report. Leaves KV
offloading to the library and the terminal to ``kvferry.tools.cli``.
"""
