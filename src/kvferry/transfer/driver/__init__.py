"""The one thin layer between kvferry and a GPU: its driver, through ctypes. Nothing is compiled.

Owns the bindings of CUDA and HIP and the low-level batch copy; decides nothing about transfers.
"""
