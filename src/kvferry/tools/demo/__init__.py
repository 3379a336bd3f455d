"""A small serving engine that runs anywhere: the whole life of a KV block, without a GPU.

``model`` computes, ``runner`` has its KV and its stream, ``blocks`` and ``tables`` say who holds
what, ``engine`` schedules, ``offload`` is where it meets kvferry, ``workload`` asks the questions,
``compare`` serves them three ways.
"""
