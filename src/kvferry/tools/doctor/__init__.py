"""The checks of ``kvferry doctor``: whether a machine is fit, and the remedies if it is not.

It owns the checks, their findings, and two child processes that measure. It changes no setting.
"""
