"""The programs for users and operators: the command line, the doctor, the live view, the demo.

Owns the commands, their output and their pages. No other package imports it.
"""
