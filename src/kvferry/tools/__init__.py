"""The programs of users and operators: the command line, the doctor, the live view, the demo.

It owns the commands and their output, plots and pages. No other package imports it.
"""
