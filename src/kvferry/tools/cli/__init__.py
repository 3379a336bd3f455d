"""The commands of ``kvferry``, one file each, and their output in a terminal.

Owns the options and the tables. Alone imports click and rich. Leaves the work to other packages.
"""
