"""The commands of ``kvferry``, one file each, and their output in a terminal.

It owns the options and the tables. It alone imports click and rich, and leaves the work to others.
"""
