"""The checks of ``kvferry doctor``: whether a machine is fit, and the remedies if it is not.

Owns the checks, their findings, and a child process that measures drives. Changes no setting.
"""
